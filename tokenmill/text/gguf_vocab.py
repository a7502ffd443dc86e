"""A tokenizer from the metadata of a GGUF file, giving the ids llama.cpp gives.

The kinds of vocabulary are in `gguf_models`. Here special tokens meet them: which tokens are read in a text as
one (control and unknown ones only with `parse_special`, user-defined ones always), which end a generation,
what goes around a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken

from tokenmill.errors import ModelError
from tokenmill.text.gguf_fields import TokenType, VocabFields, VocabTokens, damaged, read_tokens, refuse_model
from tokenmill.text.gguf_models import (
    BuiltModel,
    build_byte_level,
    build_gemma4,
    build_sentencepiece,
    build_unigram,
    build_wordpiece,
)
from tokenmill.text.tokenizer import Tokenizer, Traits

_BUILDERS: dict[str, Callable[[VocabFields, VocabTokens], BuiltModel]] = {
    "llama": build_sentencepiece,
    "gpt2": build_byte_level,
    "gemma4": build_gemma4,
    "bert": build_wordpiece,
    "t5": build_unigram,
}

# Files name one end token, models use several: an end of turn is known by its text.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    # ends of a file in code models
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
)
_END_KEYS = ("eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")

# gpt-oss marks the parts of a reply with these; they belong to the text a client parses.
_VISIBLE_TEXTS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))

_NAMED_IDS = {
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # misspelt in the format itself
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises ModelError for damaged metadata, UnsupportedModel for a kind or pre-tokenizer not implemented."""
    fields = VocabFields(metadata)
    kind = fields.text("model")
    build = _BUILDERS.get(kind)
    if build is None:
        raise refuse_model(kind, sorted(_BUILDERS))
    tokens = read_tokens(fields)
    built = build(fields, tokens)
    traits = _traits(fields, tokens, built)
    _mark_added_tokens(built, tokens, traits, str(metadata.get("general.name", "")))
    return Tokenizer(built.backend, built.spelling, traits)


# ── what the file says beside the vocabulary ───────────────────────────────────────────────────────────


def _traits(fields: VocabFields, tokens: VocabTokens, built: BuiltModel) -> Traits:
    num_tokens = len(tokens.texts)
    bos = fields.token_id("bos_token_id", num_tokens, built.default_bos)
    eos = fields.token_id("eos_token_id", num_tokens, built.default_eos)
    sep = fields.token_id("seperator_token_id", num_tokens)
    around = [
        _asked_for(fields.flag("add_bos_token", built.adds_bos), bos, "add_bos_token"),
        _asked_for(fields.flag("add_eos_token", built.adds_eos), eos, "add_eos_token"),
        _asked_for(fields.flag("add_sep_token", built.adds_sep), eos if sep is None else sep, "add_sep_token"),
    ]
    return Traits(
        bos_token_id=bos,
        eos_token_ids=_end_ids(fields, tokens, eos),
        prefix_ids=around[0],
        suffix_ids=tuple(dict.fromkeys(around[1] + around[2])),
        special_tokens=_special_texts(fields, tokens, bos, eos),
        chat_templates=_chat_templates(fields.metadata),
    )


def _asked_for(asked: bool, token_id: int | None, key: str) -> tuple[int, ...]:
    if asked and token_id is None:
        raise damaged(f"{key} is set but the file names no such token")
    return (token_id,) if asked and token_id is not None else ()


def _end_ids(fields: VocabFields, tokens: VocabTokens, eos: int | None) -> tuple[int, ...]:
    by_key = [fields.token_id(key, len(tokens.texts)) for key in _END_KEYS]
    by_text = [tokens.ids[text] for text in _END_TEXTS if text in tokens.ids]
    ends = {token_id for token_id in by_key + by_text if token_id is not None}
    ends -= _not_ends({tokens.texts[token_id] for token_id in ends}, tokens.ids)
    first = [] if eos is None else [eos]
    return tuple(first + sorted(ends - set(first)))


def _not_ends(texts: set[str], ids: dict[str, int]) -> set[int]:
    """Tokens that end a turn in one family and a part of it in another."""
    inside: set[int] = set()
    if "<|end|>" in texts and ({"<|return|>", "<|call|>"} <= texts or {"<|calls|>", "<|flush|>"} <= texts):
        inside.add(ids["<|end|>"])
    return inside


def _special_texts(fields: VocabFields, tokens: VocabTokens, bos: int | None, eos: int | None) -> dict[str, str]:
    named = {name: fields.token_id(key, len(tokens.texts)) for name, key in _NAMED_IDS.items()}
    named |= {"bos_token": bos, "eos_token": eos}
    return {name: tokens.texts[token_id] for name, token_id in named.items() if token_id is not None}


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    for key, source in metadata.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            if not isinstance(source, str):
                raise damaged(f"{key} is not a string")
            templates[key.removeprefix("tokenizer.chat_template").lstrip(".") or "default"] = source
    return templates


# ── tokens that are read whole ─────────────────────────────────────────────────────────────────────────


def _mark_added_tokens(built: BuiltModel, tokens: VocabTokens, traits: Traits, model_name: str) -> None:
    special = set(tokens.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)) | set(traits.eos_token_ids)
    special -= {tokens.ids[text] for text in _VISIBLE_TEXTS if text in tokens.ids}
    visible = set(tokens.ids_of(TokenType.USER_DEFINED)) - special
    visible |= {tokens.ids[text] for text in _VISIBLE_TEXTS if text in tokens.ids}
    swallows = _swallows_space_after(model_name)

    def added(token_id: int) -> AddedToken:
        text = tokens.texts[token_id]
        return AddedToken(text, normalized=False, special=token_id in special, rstrip=swallows(text))

    built.backend.add_special_tokens([added(token_id) for token_id in sorted(special)])
    built.backend.add_tokens([added(token_id) for token_id in sorted(visible)])
    for token_id in special | visible:
        if built.backend.token_to_id(tokens.texts[token_id]) != token_id:
            raise ModelError(f"the GGUF vocabulary spells special token {token_id} in a way that can't be read back")


def _swallows_space_after(model_name: str) -> Callable[[str], bool]:
    """Phi-3's special tokens take the white space behind them; the file does not say so, llama.cpp knows it by name."""
    name = model_name.lower()
    if "phi-3" in name or "phi3" in name:
        return lambda text: text not in ("<unk>", "<s>", "<|endoftext|>")
    return lambda text: False
