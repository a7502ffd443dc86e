"""Fill in the middle (FIM): prompts for models trained to generate the text between a prefix and a suffix.

    prefix, suffix ──► <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> ──► the model writes the middle

Families differ in their marker tokens and in the order of prefix and suffix; a model's family is found by its
vocabulary. Prefix and suffix are tokenised as plain characters, so source code that mentions a marker cannot inject it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.text.tokenizer import Tokenizer

SNIPPET = "\n\n--- snippet ---\n\n"  # separates files where a model has no token for that; llama.cpp's text


@dataclass(frozen=True)
class FimMarkers:
    """The markers of one family. Without a `middle` marker the suffix comes first and the prefix ends the prompt."""

    prefix: str
    suffix: str
    middle: str | None
    repository: str | None = None
    file: str | None = None
    others: tuple[str, ...] = ()  # further tokens that end an answer


FAMILIES = (
    FimMarkers(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", ("<|fim_pad|>",)
    ),  # Qwen2.5-Coder, Qwen3-Coder; CodeGemma with <|file_separator|>
    FimMarkers("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),  # StarCoder, Granite
    FimMarkers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FimMarkers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    FimMarkers("▁<PRE>", "▁<SUF>", "▁<MID>", others=("▁<EOT>",)),  # CodeLlama
    FimMarkers("<PRE>", "<SUF>", "<MID>", others=("<EOT>",)),
    FimMarkers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    FimMarkers("<|prefix|>", "<|suffix|>", "<|middle|>"),
    FimMarkers("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


@dataclass(frozen=True)
class FimTokens:
    """The marker tokens of one model."""

    tokenizer: Tokenizer
    prefix_id: int
    suffix_id: int
    middle_id: int | None
    repository_id: int | None
    file_id: int | None
    stop_ids: tuple[int, ...]

    def prompt_ids(
        self, prefix: str | Sequence[int], suffix: str, files: Sequence[tuple[str, str]] = (), *, with_bos: bool = True
    ) -> list[int]:
        """Return the prompt whose answer is the middle. `files`: other files of the project, as (name, text)."""
        before = self._ids(prefix) if isinstance(prefix, str) else list(prefix)
        after = self._ids(suffix)
        if self.middle_id is None:
            ids = [self.suffix_id, *after, self.prefix_id, *before]
        else:
            ids = [self.prefix_id, *before, self.suffix_id, *after, self.middle_id]
        return [*(self._bos() if with_bos else []), *self._file_ids(files), *ids]

    def _file_ids(self, files: Sequence[tuple[str, str]]) -> list[int]:
        if not files:
            return []
        if self.file_id is None:
            return self._ids("".join(f"{text}{SNIPPET}" for _, text in files))
        ids = [] if self.repository_id is None else [self.repository_id, *self._ids("project\n")]
        for name, text in files:
            ids += [self.file_id, *self._ids(f"{name}\n{text}\n")]
        return [*ids, self.file_id, *self._ids("current\n")]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, parse_special=False) if text else []

    def _bos(self) -> list[int]:
        """Return the BOS token if this tokenizer adds one to a text."""
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and self.tokenizer.encode("a")[:1] == [bos] else []


def find_fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """Return the fill-in-the-middle markers of a vocabulary; None: the model has none."""
    for family in FAMILIES:
        prefix, suffix = tokenizer.token_id(family.prefix), tokenizer.token_id(family.suffix)
        middle = None if family.middle is None else tokenizer.token_id(family.middle)
        if prefix is None or suffix is None or (family.middle is not None and middle is None):
            continue
        repository, file = (
            None if text is None else tokenizer.token_id(text) for text in (family.repository, family.file)
        )
        others = [tokenizer.token_id(text) for text in family.others]
        stops = [token_id for token_id in (prefix, suffix, middle, repository, file, *others) if token_id is not None]
        return FimTokens(tokenizer, prefix, suffix, middle, repository, file, tuple(stops))
    return None
