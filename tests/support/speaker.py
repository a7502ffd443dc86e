"""A model that generates the text a test gives it, behind the real front and core: template, grammar, reader, events.

Its vocabulary is the 256 bytes and the markers of a family, each marker being one token as in real vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken

from tests.support.scripted_engine import CONFIG
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenmill.engine.build import assemble, vocabulary_of
from tokenmill.engine.core import EngineCore
from tokenmill.engine.frontend import ModelFrontend
from tokenmill.engine.results import EventFold
from tokenmill.errors import error_with_code
from tokenmill.kv.storage import KVStorage
from tokenmill.testing.scripted_models import ScriptedModel
from tokenmill.text.tokenizer import BYTE_LEVEL, EOS_ID, Tokenizer, Traits, byte_tokenizer
from tokenmill.types import ChatRequest, Event

MAX_CONTEXT = 8192
LAYER = LayerSpec(Gqa(1, 1, 8, 0.35, None), MlpSpec(8))


def marker_tokenizer(template: str, markers: Sequence[str] = (), special: Sequence[str] = ()) -> Tokenizer:
    """Build a tokenizer of bytes with each marker as one token; those in `special` are control tokens, which are
    never shown as text."""
    plain = byte_tokenizer()
    plain.backend.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    plain.backend.add_special_tokens([AddedToken(marker, normalized=False) for marker in special])
    names = {"bos_token": "", "eos_token": "</s>"}
    traits = Traits(eos_token_ids=(EOS_ID,), special_tokens=names, chat_templates={"default": template})
    return Tokenizer(plain.backend, BYTE_LEVEL, traits)


class Speaker:
    def __init__(
        self, template: str, markers: Sequence[str] = (), special: Sequence[str] = (), tool_format: str = "auto"
    ) -> None:
        self.tokenizer = marker_tokenizer(template, markers, special)
        self.vocab_size = self.tokenizer.vocab_size
        self.config = EngineConfig(
            ModelConfig(max_context=MAX_CONTEXT, dtype="float32", tool_format=tool_format),
            CacheConfig(num_blocks=1025, block_size=16, kv_dtype="float32"),
            SchedulerConfig(max_running=8, token_budget=8192),
            CONFIG.ops,
        )
        spec = ModelSpec("llama", self.vocab_size, 16, (LAYER,), 1e-5, MAX_CONTEXT, tied_head=True)
        self.frontend = ModelFrontend(self.config, "speaker", Path("speaker"), spec, self.tokenizer, 0)
        self.input_processor = self.frontend.input_processor(MAX_CONTEXT)

    def prompt(self, chat_request: ChatRequest) -> str:
        return self.input_processor.chat_text(chat_request)

    def events(self, chat_request: ChatRequest, says: str | list[int], *, is_stubborn: bool = False) -> list[Event]:
        """Return the events of an answer. A stubborn model tries to generate its text in spite of the grammar; where
        the grammar forbids its token, it generates a random one."""
        request = self.input_processor.process(chat_request)
        core = self._core(len(request.prompt_token_ids), self._ids(says), is_stubborn)
        core.prepare(request)
        processor = self.frontend.output_processor(chat_request, request)
        core.add(request)
        events: list[Event] = []
        while not processor.is_finished:
            for output in core.step():
                if output.finish_reason == "error":
                    raise error_with_code(output.error_code, output.error or "")
                events += processor.process(output)
            for index in processor.pop_stopped():
                core.abort(request.request_id, index)
        return events

    def answers(self, chat_request: ChatRequest, says: str | list[int], *, is_stubborn: bool = False) -> list[Event]:
        """Return the complete answers, one per choice."""
        folds = [EventFold() for _ in range(chat_request.params.n)]
        for event in self.events(chat_request, says, is_stubborn=is_stubborn):
            folds[event.index].add(event)
        return [fold.event for fold in folds]

    def answer(self, chat_request: ChatRequest, says: str | list[int], *, is_stubborn: bool = False) -> Event:
        return self.answers(chat_request, says, is_stubborn=is_stubborn)[0]

    def _ids(self, says: str | list[int]) -> list[int]:
        """Encode a text, with markers as single tokens; ids are returned unchanged."""
        return self.tokenizer.encode(says, add_special_tokens=False) if isinstance(says, str) else says

    def _core(self, prompt_len: int, says: list[int], is_stubborn: bool) -> EngineCore:
        def next_logits(position: int, _token: int) -> torch.Tensor:
            place = position + 1 - prompt_len
            generator = torch.Generator().manual_seed(position)
            logits = torch.rand(self.vocab_size, generator=generator) * (5.0 if is_stubborn else 0.0)
            logits[says[place] if 0 <= place < len(says) else EOS_ID] += 20.0
            return logits

        model = ScriptedModel(self.vocab_size, next_logits)
        storage = KVStorage(model.layout, self.config.cache.num_blocks or 0, 16, torch.device("cpu"))
        return assemble(
            self.config, model, storage, lambda: vocabulary_of(self.config, self.frontend.spec, self.tokenizer)
        )
