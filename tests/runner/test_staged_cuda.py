"""The stages of a pipeline with GPUs, as threads without any: the answers of one stage on a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe

import pytest
import torch

pytest.importorskip("triton")

from tests.runner.test_cuda_runner import (
    BLOCK,
    BYTES,
    CONTEXT,
    EOS,
    INFO,
    ROWS,
    Answers,
    answers,
    guided_requests,
    requests,
)
from tests.support.eager_device import CPU, eager_runner
from tests.support.native_models import LLAMA, layout_of, random_weights
from tokenmill.config import SchedulerConfig
from tokenmill.engine.core import EngineCore, Runner
from tokenmill.guided.compile import Compiler
from tokenmill.guided.grammars import Grammars
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.kv.cache import KVCache
from tokenmill.kv.storage import KVStorage
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.parallel.cuts import Cuts
from tokenmill.parallel.group import Shard, SingleRank
from tokenmill.parallel.stage_link import StageLink
from tokenmill.parallel.stages import split_layers
from tokenmill.runner.ranked import Followers, FollowingSampler, follow
from tokenmill.runner.runner import ModelRunner
from tokenmill.runner.staged_cuda import DevicePipelineRunner, StagedCudaRunner, run_device_message
from tokenmill.sampling.sampler import Sampler
from tokenmill.scheduler import Scheduler
from tokenmill.text.tokenizer import byte_tokenizer
from tokenmill.types import Request, TokenLogprobs

SPEC = replace(LLAMA, vocab_size=BYTES, layers=LLAMA.layers[:1] * 4)
WEIGHTS = random_weights(SPEC)
BUDGET, LANES, NUM_BLOCKS = 24, 3, 200


def model_of(layers: range) -> Decoder:
    shard = Shard(SingleRank(), Cuts(0, 1, {}), layers)
    return Decoder(SPEC, Loader(WEIGHTS, REFERENCE_OPS, torch.float32, CPU, shard=shard), CONTEXT)


def storage_of(layers: range) -> KVStorage:
    return KVStorage(layout_of(SPEC).of_layers(layers), NUM_BLOCKS, BLOCK, CPU)


def core_over(runner: Runner, num_lanes: int) -> tuple[EngineCore, Scheduler]:
    cache = KVCache(windows=(None,), num_blocks=NUM_BLOCKS, block_size=BLOCK)
    config = SchedulerConfig(max_running=ROWS, token_budget=BUDGET)
    scheduler = Scheduler(
        config=config, cache=cache, max_rows=ROWS, clock=time.monotonic, continues=runner.continues, num_lanes=num_lanes
    )
    grammars = Grammars(Compiler(lambda: Vocabulary(byte_tokenizer(), BYTES, (EOS,))), ROWS, BYTES)
    return EngineCore(scheduler, runner, INFO, grammars=grammars), scheduler


@contextmanager
def pipeline(stages: int) -> Iterator[tuple[DevicePipelineRunner, list[StagedCudaRunner]]]:
    """Each stage but the first is a thread."""
    pipes = [Pipe(duplex=False) for _ in range(stages)]
    parts, runners, threads, connections = split_layers(SPEC, stages), [], [], []
    for number, layers in enumerate(parts):
        link = StageLink(pipes[number][0], pipes[(number + 1) % stages][1], reads_ahead=number == 0)
        sampler = Sampler(BYTES, ROWS, CPU) if number == 0 else FollowingSampler(BYTES, ROWS, CPU)
        runners.append(StagedCudaRunner(model_of(layers), storage_of(layers), sampler, ROWS, CONTEXT, link, BUDGET))
        if number:
            ours, theirs = Pipe()
            connections.append(ours)
            carry_out = partial(run_device_message, runners[-1])
            threads.append(threading.Thread(target=follow, args=(carry_out, number, SingleRank(), theirs), daemon=True))
            threads[-1].start()
    yield DevicePipelineRunner(runners[0], SingleRank(), Followers(connections), beside=0, depth=LANES), runners
    for ours in connections:
        ours.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def without_last_bits(found: Answers) -> Answers:
    """A library's products may add in another order in another batch."""
    return {key: [one.token_id if isinstance(one, TokenLogprobs) else one for one in said if not isinstance(one, float)]
            for key, said in found.items()}  # fmt: skip


@pytest.mark.parametrize("asked", [requests, guided_requests])
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_say_what_one_stage_says(
    stages: int, asked: Callable[[], list[Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = range(SPEC.num_layers)
    one = ModelRunner(model_of(whole), storage_of(whole), Sampler(BYTES, ROWS, CPU), ROWS, CONTEXT)
    expected = answers(*core_over(one, 1), asked=asked)
    eager_runner(monkeypatch)
    with pipeline(stages) as (runner, parts):
        found = answers(*core_over(runner, LANES), asked=asked)
    assert without_last_bits(found) == without_last_bits(expected)
    assert not any(part._launched for part in parts), "steps that are done are forgotten"
