"""A core over a model without weights: everything except the model is real, and a step takes microseconds."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill import SamplingParams
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine.build import assemble
from tokenmill.engine.core import EngineCore
from tokenmill.engine.input_processor import InputProcessor
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.kv.storage import KVStorage
from tokenmill.models.protocol import Model
from tokenmill.testing.scripted_models import ContextModel
from tokenmill.text.tokenizer import byte_tokenizer
from tokenmill.types import PromptRequest, SequenceOutput

VOCAB = 258
MAX_CONTEXT = 256
CONFIG = EngineConfig(
    ModelConfig(max_context=MAX_CONTEXT, dtype="float32"),
    CacheConfig(num_blocks=65, block_size=4, kv_dtype="float32"),
    SchedulerConfig(max_running=8, token_budget=32),
    OpsConfig(device="cpu", backend="reference", threads=1),
)


def scripted_core(model: Model | None = None, *, num_blocks: int = 65, prefix_caching: bool = True) -> EngineCore:
    model = model or ContextModel(VOCAB)
    config = replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=num_blocks, prefix_caching=prefix_caching))
    layout = model.layout  # type: ignore[attr-defined]  # scripted models know their own
    storage = KVStorage(layout, num_blocks, CONFIG.cache.tokens_per_block, torch.device("cpu"))
    return assemble(config, model, storage)


def byte_input_processor() -> InputProcessor:
    return InputProcessor(tokenizer=byte_tokenizer(), vocab_size=VOCAB, max_context=MAX_CONTEXT, eos_token_ids=(257,))


def run(core: EngineCore, asked: list[PromptRequest]) -> dict[str, list[SequenceOutput]]:
    """Run until all requests have ended; return all outputs by request id."""
    for one in asked:
        core.add(byte_input_processor().process(one))
    outputs: dict[str, list[SequenceOutput]] = {one.request_id: [] for one in asked}
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[SequenceOutput], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


def output_processor_for(params: SamplingParams) -> OutputProcessor:
    request = byte_input_processor().process(PromptRequest(prompt="p", params=params, request_id="r"))
    keep_best = params.n if params.best_of is not None else None
    return OutputProcessor(request, byte_tokenizer(), keep_best=keep_best, wants_logprobs=params.logprobs is not None)
