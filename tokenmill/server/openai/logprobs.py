"""Logprobs in OpenAI's two shapes (chat, and the legacy one of completions) and in vLLM's for prompts."""

from __future__ import annotations

from typing import Any

from tokenmill.types import TokenInfo


def chat_logprobs(infos: list[TokenInfo]) -> dict[str, Any]:
    return {"content": [_chat_token(info) for info in infos], "refusal": None}


def _chat_token(info: TokenInfo) -> dict[str, Any]:
    tops = [_spelled(text, raw, logprob) for _, text, raw, logprob in info.top]
    return {**_spelled(info.text, info.raw, info.logprob), "top_logprobs": tops}


def _spelled(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


class LegacyLogprobs:
    """tokens, token_logprobs, top_logprobs and text_offset side by side; offsets go on across chunks."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset

    def render(self, infos: list[TokenInfo]) -> dict[str, Any]:
        offsets = []
        for info in infos:
            offsets.append(self._offset)
            self._offset += len(info.text)
        return {
            "tokens": [info.text for info in infos],
            "token_logprobs": [info.logprob for info in infos],
            "top_logprobs": [_legacy_top(info) for info in infos],
            "text_offset": offsets,
        }


def _legacy_top(info: TokenInfo) -> dict[str, float]:
    """The chosen token is always among them. Two tokens may spell alike; the likelier one is kept."""
    tops: dict[str, float] = {}
    for _, text, _, logprob in info.top:
        tops.setdefault(text, logprob)
    tops.setdefault(info.text, info.logprob)
    return tops


def echoed_logprobs(prompt: str, prompt_infos: list[TokenInfo | None], infos: list[TokenInfo]) -> dict[str, Any]:
    """Prompt and answer in one. Nothing predicts the first token: its logprob is null, its text what is left over.

    That is less than nothing where a tokenizer begins a text with a space that nobody wrote.
    """
    known = [info for info in prompt_infos if info is not None]
    first_length = len(prompt) - sum(len(info.text) for info in known)
    rest = LegacyLogprobs(first_length).render([*known, *infos])
    rest["text_offset"] = [max(0, offset) for offset in rest["text_offset"]]
    first = {"tokens": prompt[: max(0, first_length)], "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [first[name], *values] for name, values in rest.items()}


def prompt_logprobs(infos: list[TokenInfo | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: per position a map from token id to logprob, rank and text."""
    return [None if info is None else _prompt_token(info) for info in infos]


def _prompt_token(info: TokenInfo) -> dict[str, Any]:
    shown: dict[str, Any] = {
        str(token_id): {"logprob": logprob, "rank": place + 1, "decoded_token": text}
        for place, (token_id, text, _, logprob) in enumerate(info.top)
    }
    shown[str(info.token_id)] = {"logprob": info.logprob, "rank": info.rank, "decoded_token": info.text}
    return shown
