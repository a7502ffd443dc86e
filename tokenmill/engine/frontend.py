"""The front's part of a model: spec, tokenizer, names and limits. Does not import torch."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenmill.arch.gguf_file import read_gguf
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ModelSpec
from tokenmill.config import EngineConfig
from tokenmill.engine.answer_reader import AnswerReader
from tokenmill.engine.customized import with_own_adapter
from tokenmill.engine.input_processor import InputProcessor, Shifting
from tokenmill.engine.output_processor import MakeReader, OutputProcessor
from tokenmill.engine.sampling_defaults import sampling_defaults
from tokenmill.engine.scripted import scripted_spec
from tokenmill.engine.status import ModelInfo
from tokenmill.engine.tool_use import SpeechFinder, answer_start, callable_tools
from tokenmill.errors import InvalidConfig
from tokenmill.store import is_scripted, resolve_model
from tokenmill.text.fim import find_fim_tokens
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.load import load_tokenizer
from tokenmill.text.script import Script, read_script
from tokenmill.text.speech import Speech
from tokenmill.text.template import CHATML
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import ChatRequest, EmbedRequest, PromptRequest, Request
from tokenmill.version import VERSION


@dataclass(frozen=True)
class ModelFrontend:
    config: EngineConfig
    name: str
    model_path: Path
    spec: ModelSpec
    tokenizer: Tokenizer | None
    created: int

    def input_processor(self, max_context: int) -> InputProcessor:
        return InputProcessor(
            tokenizer=self.tokenizer,
            vocab_size=self.spec.vocab_size,
            max_context=max_context,
            eos_token_ids=self.eos_token_ids,
            shifting=Shifting(self.config.cache.context_shift, self.config.cache.context_keep),
            speeches=self.speeches,
            literal_content=self.config.model.literal_content,
        )

    @cached_property
    def speeches(self) -> SpeechFinder:
        return SpeechFinder(self.tokenizer, self.config.model.tool_format)

    @property
    def speech(self) -> Speech | None:
        """The format in which the model writes reasoning and tool calls, detected from its own chat template."""
        return self.speeches.of(None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return eos_ids(self.spec, self.tokenizer)

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's own sampling parameters, as arguments of `SamplingParams`, for requests that set none."""
        if not self.config.model.sampling_defaults or is_scripted(self.config.model.model):
            return {}
        return sampling_defaults(self.config.model.model, self.model_path)

    def output_processor(
        self, client_request: ChatRequest | PromptRequest | EmbedRequest, request: Request
    ) -> OutputProcessor:
        params = None if isinstance(client_request, EmbedRequest) else client_request.params
        keep_best = params.n if params is not None and params.best_of is not None else None
        wants_logprobs = params is not None and params.logprobs is not None
        return OutputProcessor(
            request,
            self.tokenizer,
            keep_best=keep_best,
            wants_logprobs=wants_logprobs,
            make_reader=self._make_reader(client_request, request) if isinstance(client_request, ChatRequest) else None,
        )

    def _make_reader(self, client_request: ChatRequest, request: Request) -> MakeReader | None:
        """Return the factory of the reader that splits an answer into text, reasoning and tool calls; None: answers
        are plain text."""
        speech, tools = self.speeches.of(client_request.chat_template), callable_tools(client_request)
        if speech is None or self.tokenizer is None or not (tools or speech.thinking):
            return None
        start = answer_start(speech, self.tokenizer, request.prompt_token_ids)
        return lambda detokenizer: AnswerReader(speech.reader(tools, start), detokenizer, tools)

    def info(self, max_context: int) -> ModelInfo:
        return ModelInfo(
            name=self.name,
            max_context=max_context,
            vocab_size=self.spec.vocab_size,
            created=self.created,
            fingerprint=fingerprint(self.config, self.spec),
            spec=self.spec,
            can_embed=True,
            shifts_context=self.config.cache.context_shift,
            path=self.model_path,
            chat_template=(self.tokenizer.chat_template or "") if self.tokenizer else "",
            can_call_tools=self.speech is not None and self.speech.calls is not None and self.speech.describes_tools,
            can_think=self.speech is not None and self.speech.thinking is not None,
            defaults=self.sampling_defaults,
            can_fill_in=self.tokenizer is not None and find_fim_tokens(self.tokenizer) is not None,
        )


class ModelText:
    """Conversion between text and token ids for one model: needs its tokenizer and chat template, not its weights."""

    def __init__(self, input_processor: InputProcessor) -> None:
        self._input_processor = input_processor

    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text; `parse_special`: control tokens written in it become those tokens."""
        tokenizer = self._input_processor.tokenizer
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        """Return the token ids of a conversation in the model's chat template."""
        return self._input_processor.chat_ids(request)

    def chat_text(self, request: ChatRequest) -> str:
        """Return the text of a conversation in the model's chat template."""
        return self._input_processor.chat_text(request)

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self._input_processor.tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        """Return the bytes of each token separately, including its leading space."""
        tokenizer = self._input_processor.tokenizer
        return [tokenizer.token_bytes(token_id) for token_id in ids]


def load_frontend(config: EngineConfig) -> ModelFrontend:
    model = resolve_model(config.model.model)
    spec, tokenizer = spec_and_tokenizer(config, model.path)
    return ModelFrontend(
        config=with_own_adapter(config, model.custom),
        name=config.model.served_name or model.name,
        model_path=model.path,
        spec=spec,
        tokenizer=tokenizer,
        created=int(time.time()),
    )


def spec_and_tokenizer(config: EngineConfig, path: Path) -> tuple[ModelSpec, Tokenizer | None]:
    """Read a model's spec and its tokenizer, with the chat template from the config if it names one."""
    if not is_scripted(config.model.model):
        return read_spec(path), _with_template(tokenizer_of(path), config.model.chat_template)
    script = read_script(path)
    tokenizer = script_tokenizer(script)
    if tokenizer.chat_template is None:
        tokenizer = tokenizer.with_chat_template(CHATML)
    spec = scripted_spec(script, tokenizer)
    return spec, _with_template(tokenizer, config.model.chat_template)


def script_tokenizer(script: Script) -> Tokenizer:
    """Return the tokenizer that a script names, or a tokenizer of bytes."""
    if script.tokenizer_source is None:
        return script.byte_tokenizer()
    if not script.tokenizer_source.exists():
        raise InvalidConfig(f"the script's tokenizer {script.tokenizer_source} does not exist", param="model")
    tokenizer = tokenizer_of(script.tokenizer_source)
    if tokenizer is None:
        raise InvalidConfig(f"{script.tokenizer_source} has no tokenizer for the script", param="model")
    return tokenizer


def _with_template(tokenizer: Tokenizer | None, file: str | None) -> Tokenizer | None:
    if file is None:
        return tokenizer
    if tokenizer is None:
        raise InvalidConfig("a model without a tokenizer has no use for a chat template", param="chat_template")
    try:
        return tokenizer.with_chat_template(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the chat template {file} cannot be read: {error}", param="chat_template") from None


def eos_ids(spec: ModelSpec, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return all ids that end an answer: the model's and the tokenizer's (they differ for some chat models), except ids
    that the model can't sample."""
    from_tokenizer = tokenizer.eos_token_ids if tokenizer else ()
    named = dict.fromkeys((*spec.eos_token_ids, *from_tokenizer))
    return tuple(token_id for token_id in named if 0 <= token_id < spec.vocab_size)


def tokenizer_of(path: Path) -> Tokenizer | None:
    """Load the model's tokenizer; None for a bare config: such a model (random weights) accepts only token ids."""
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(read_gguf(path).metadata)
    folder = path if path.is_dir() else path.parent
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def fingerprint(config: EngineConfig, spec: ModelSpec) -> str:
    facts = repr((VERSION, config.model, config.ops, config.cache.kv_dtype, spec))
    return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:12]
