"""Tokenizers from GGUF files: the metadata under `tokenizer.ggml.` becomes a `Tokenizer`.

    fields    read and checked by type: tokens, token types, scores, merges
    models    llama (SentencePiece), gpt2 (byte-level BPE), gemma4, bert (WordPiece), t5 (unigram), each built
              from the `tokenizers` library's parts
    traits    special tokens, end tokens, added spaces, chat templates

llama.cpp's behaviour is the reference: the tests use its vocabulary files and expected ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tokenmill.errors import ModelError, UnsupportedModel
from tokenmill.text.pretokenizers import pre_tokenizer
from tokenmill.text.tokenizer import BYTE_LEVEL, SPACE_MARK, WORDPIECE, Spelling, Tokenizer, Traits, sentencepiece

PREFIX = "tokenizer.ggml."
MAX_TOKEN_LENGTH = 1024  # characters; real tokens have up to 256, and finding merges takes quadratic time


class TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def damaged(problem: str) -> ModelError:
    return ModelError(f"the GGUF vocabulary can't be used: {problem}", hint="fetch or convert the file again")


@dataclass(frozen=True)
class VocabFields:
    """Typed access to `tokenizer.ggml.*`; `default` is returned for an absent key."""

    metadata: Mapping[str, Any]

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(PREFIX + key, default)
        if not isinstance(value, str):
            raise damaged(f"{PREFIX}{key} is {_describe(value)}, expected a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise damaged(f"{PREFIX}{key} is {_describe(value)}, expected true or false")
        return value

    def token_id(self, key: str, num_tokens: int, default: int | None = None) -> int | None:
        value = self.metadata.get(PREFIX + key)
        if value is None:
            return default if default is not None and default < num_tokens else None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
            raise damaged(f"{PREFIX}{key} is {_describe(value)}, expected an id below {num_tokens}")
        return value

    def array(self, key: str) -> list[Any] | None:
        value = self.metadata.get(PREFIX + key)
        if value is None:
            return None
        items = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(items, list | tuple):
            raise damaged(f"{PREFIX}{key} is {_describe(value)}, expected an array")
        return list(items)

    def strings(self, key: str) -> list[str]:
        items = self.array(key)
        if items is None:
            raise damaged(f"{PREFIX}{key} is missing")
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise damaged(f"{PREFIX}{key}[{index}] is {_describe(item)}, expected a string")
        return items

    def numbers(self, key: str, length: int) -> list[float] | None:
        items = self.array(key)
        if items is None:
            return None
        if len(items) != length:
            raise damaged(f"{PREFIX}{key} has {len(items)} entries for {length} tokens")
        if not all(isinstance(item, int | float) and item == item for item in items):
            raise damaged(f"{PREFIX}{key} contains a value that is not a number")
        return items


@dataclass(frozen=True)
class VocabTokens:
    """The tokens by id: text, score and type of each."""

    texts: list[str]
    scores: list[float] | None
    types: list[TokenType]
    ids: dict[str, int]

    def ids_of(self, *types: TokenType) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]


def read_tokens(fields: VocabFields) -> VocabTokens:
    texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(fields.strings("tokens"))]
    if not texts:
        raise damaged(f"{PREFIX}tokens is empty")
    if (longest := max(map(len, texts))) > MAX_TOKEN_LENGTH:
        raise damaged(f"{PREFIX}tokens contains a token of {longest} characters, more than {MAX_TOKEN_LENGTH}")
    ids = {text: index for index, text in enumerate(texts)}
    if len(ids) != len(texts):
        double = next(text for index, text in enumerate(texts) if ids[text] != index)
        raise damaged(f"{PREFIX}tokens contains {double!r} twice")
    return VocabTokens(texts, fields.numbers("scores", len(texts)), _types(fields, len(texts)), ids)


def _types(fields: VocabFields, length: int) -> list[TokenType]:
    numbers = fields.numbers("token_type", length)
    if numbers is None:
        return [TokenType.NORMAL] * length
    known: dict[float, TokenType] = {float(kind): kind for kind in TokenType}
    return [known.get(number, TokenType.UNDEFINED) for number in numbers]


def refuse_model(name: str, known: list[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"the GGUF vocabulary has the model {name!r}, which is not implemented", hint=f"implemented: {', '.join(known)}"
    )


def _describe(value: object) -> str:
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


@dataclass(frozen=True)
class BuiltModel:
    """A backend without special tokens, and the defaults of its vocabulary kind for what the file does not say."""

    backend: tokenizers.Tokenizer
    spelling: Spelling
    adds_bos: bool = False
    adds_eos: bool = False
    adds_sep: bool = False
    default_bos: int | None = None
    default_eos: int | None = None


# ── SentencePiece BPE ──────────────────────────────────────────────────────────────────────────────────


def build_sentencepiece(fields: VocabFields, tokens: VocabTokens) -> BuiltModel:
    if tokens.scores is None:
        raise damaged(f"{PREFIX}scores is missing")
    adds_space = fields.flag("add_space_prefix", True)
    merges = merges_by_score(tokens.texts, tokens.scores, tokens.ids)
    backend = tokenizers.Tokenizer(_fallback_bpe(fields, tokens, merges))
    backend.normalizer = _space_marks(adds_space)
    backend.decoder = _sentencepiece_decoder(adds_space)
    return BuiltModel(backend, sentencepiece(adds_space), adds_bos=True, default_bos=1, default_eos=2)


def merges_by_score(texts: list[str], scores: list[float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins into a token, best score first, as SentencePiece merges them."""
    ranked: list[tuple[float, int, str, str]] = []
    for token_id, text in enumerate(texts):
        score = -scores[token_id]
        for cut in range(1, len(text)):
            left = text[:cut]
            if left in ids and (right := text[cut:]) in ids:
                ranked.append((score, token_id, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _fallback_bpe(fields: VocabFields, tokens: VocabTokens, merges: list[tuple[str, str]]) -> models.BPE:
    unknown_id = fields.token_id("unknown_token_id", len(tokens.texts), default=0)
    unknown = None if unknown_id is None else tokens.texts[unknown_id]
    return models.BPE(vocab=tokens.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _space_marks(adds_space: bool) -> normalizers.Normalizer:
    mark = normalizers.Replace(" ", SPACE_MARK)
    return normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if adds_space else mark


def _sentencepiece_decoder(drops_first_space: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if drops_first_space else steps)


# ── BPE with a list of merges ──────────────────────────────────────────────────────────────────────────


def read_merges(fields: VocabFields, ids: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, line in enumerate(fields.strings("merges")):
        cut = line.find(" ", 1)  # a merge may begin with a space
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise damaged(f"{PREFIX}merges[{index}] {line[:40]!r} does not join two tokens into a third")
        merges.append((left, right))
    return merges


def build_byte_level(fields: VocabFields, tokens: VocabTokens) -> BuiltModel:
    name = fields.text("pre", "default")
    if name == "gemma4":
        return build_gemma4(fields, tokens)
    rule = pre_tokenizer(name)
    merges = read_merges(fields, tokens.ids)
    backend = tokenizers.Tokenizer(models.BPE(vocab=tokens.ids, merges=merges, ignore_merges=rule.whole_words))
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    # Very old files name neither token; 11 is <|endoftext|> of Falcon, the first family of this kind.
    return BuiltModel(
        backend, BYTE_LEVEL, adds_bos=rule.adds_bos, adds_sep=rule.adds_sep, default_bos=11, default_eos=11
    )


def build_gemma4(fields: VocabFields, tokens: VocabTokens) -> BuiltModel:
    backend = tokenizers.Tokenizer(_fallback_bpe(fields, tokens, read_merges(fields, tokens.ids)))
    backend.normalizer = _space_marks(adds_space=False)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    backend.decoder = _sentencepiece_decoder(drops_first_space=False)
    return BuiltModel(backend, sentencepiece(drops_first_space=False), adds_bos=True)


# ── WordPiece ──────────────────────────────────────────────────────────────────────────────────────────


def build_wordpiece(fields: VocabFields, tokens: VocabTokens) -> BuiltModel:
    vocab = {
        _wordpiece(text, kind): index for index, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
    }
    if len(vocab) != len(tokens.texts):
        raise damaged(f"{PREFIX}tokens contains a word twice")
    unknown_id = fields.token_id("unknown_token_id", len(tokens.texts), default=100)
    if unknown_id is None:
        raise damaged(f"{PREFIX}unknown_token_id is missing")
    unknown = _wordpiece(tokens.texts[unknown_id], tokens.types[unknown_id])
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token=unknown))
    lowercase = fields.flag("normalizer.lowercase", True)
    accents = fields.flag("normalizer.strip_accents", lowercase)
    backend.normalizer = normalizers.BertNormalizer(strip_accents=accents, lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    default_bos = fields.token_id("cls_token_id", len(tokens.texts), default=101)
    return BuiltModel(backend, WORDPIECE, adds_bos=True, adds_sep=True, default_bos=default_bos)


def _wordpiece(text: str, kind: TokenType) -> str:
    if text.startswith(SPACE_MARK):
        return text[1:]
    whole = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or (text.startswith("[") and text.endswith("]"))
    return text if whole else "##" + text


# ── Unigram ────────────────────────────────────────────────────────────────────────────────────────────


def build_unigram(fields: VocabFields, tokens: VocabTokens) -> BuiltModel:
    if tokens.scores is None:
        raise damaged(f"{PREFIX}scores is missing")
    unknown_id = fields.token_id("unknown_token_id", len(tokens.texts), default=2)
    has_bytes = bool(tokens.ids_of(TokenType.BYTE))
    pairs = list(zip(tokens.texts, tokens.scores, strict=True))
    backend = tokenizers.Tokenizer(models.Unigram(pairs, unk_id=unknown_id, byte_fallback=has_bytes))
    adds_space = fields.flag("add_space_prefix", True)
    backend.normalizer = _unigram_normalizer(fields)
    scheme = "always" if adds_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme)
    return BuiltModel(backend, sentencepiece(adds_space), adds_eos=True, default_eos=1)


def _unigram_normalizer(fields: VocabFields) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    charsmap = fields.array("precompiled_charsmap")
    if charsmap:
        steps.append(_precompiled(_as_bytes(charsmap)))
    if fields.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps)


def _precompiled(charsmap: bytes) -> normalizers.Normalizer:
    try:
        return normalizers.Precompiled(charsmap)
    except Exception as error:  # the library raises bare Exception
        raise damaged(f"{PREFIX}precompiled_charsmap is not valid: {error}") from error


def _as_bytes(numbers: list[int]) -> bytes:
    if not all(isinstance(number, int) and -128 <= number < 256 for number in numbers):
        raise damaged(f"{PREFIX}precompiled_charsmap contains a value that is not a byte")
    return bytes(number & 0xFF for number in numbers)


_BUILDERS: dict[str, Callable[[VocabFields, VocabTokens], BuiltModel]] = {
    "llama": build_sentencepiece,
    "gpt2": build_byte_level,
    "gemma4": build_gemma4,
    "bert": build_wordpiece,
    "t5": build_unigram,
}

# A file names one end token, but models use several: end-of-turn tokens are recognised by their text.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    # end of file, in code models
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
)
_END_KEYS = ("eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")

# gpt-oss marks the parts of a reply with these; the reader of its format needs them in the text.
_VISIBLE_TEXTS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))

_NAMED_IDS = {
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # misspelt in the format itself
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises ModelError for damaged metadata, UnsupportedModel for a kind or pre-tokenizer that is not implemented.
    """
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


# ── special tokens, end tokens, templates ──────────────────────────────────────────────────────────────


def _traits(fields: VocabFields, tokens: VocabTokens, built: BuiltModel) -> Traits:
    num_tokens = len(tokens.texts)
    bos = fields.token_id("bos_token_id", num_tokens, built.default_bos)
    eos = fields.token_id("eos_token_id", num_tokens, built.default_eos)
    sep = fields.token_id("seperator_token_id", num_tokens)
    around = [
        _ids_to_add(fields.flag("add_bos_token", built.adds_bos), bos, "add_bos_token"),
        _ids_to_add(fields.flag("add_eos_token", built.adds_eos), eos, "add_eos_token"),
        _ids_to_add(fields.flag("add_sep_token", built.adds_sep), eos if sep is None else sep, "add_sep_token"),
    ]
    return Traits(
        bos_token_id=bos,
        eos_token_ids=_end_ids(fields, tokens, eos),
        prefix_ids=around[0],
        suffix_ids=tuple(dict.fromkeys(around[1] + around[2])),
        special_tokens=_special_texts(fields, tokens, bos, eos),
        chat_templates=_chat_templates(fields.metadata),
    )


def _ids_to_add(is_set: bool, token_id: int | None, key: str) -> tuple[int, ...]:
    if is_set and token_id is None:
        raise damaged(f"{key} is set but the file names no such token")
    return (token_id,) if is_set and token_id is not None else ()


def _end_ids(fields: VocabFields, tokens: VocabTokens, eos: int | None) -> tuple[int, ...]:
    by_key = [fields.token_id(key, len(tokens.texts)) for key in _END_KEYS]
    by_text = [tokens.ids[text] for text in _END_TEXTS if text in tokens.ids]
    ends = {token_id for token_id in by_key + by_text if token_id is not None}
    ends -= _not_ends({tokens.texts[token_id] for token_id in ends}, tokens.ids)
    first = [] if eos is None else [eos]
    return tuple(first + sorted(ends - set(first)))


def _not_ends(texts: set[str], ids: dict[str, int]) -> set[int]:
    """Return ids that look like ends of a turn but end only a part of it in this family (`<|end|>` of gpt-oss)."""
    has_parts = {"<|return|>", "<|call|>"} <= texts or {"<|calls|>", "<|flush|>"} <= texts
    return {ids["<|end|>"]} if "<|end|>" in texts and has_parts else set()


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


# ── added tokens ───────────────────────────────────────────────────────────────────────────────────────


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
            raise ModelError(f"the text of special token {token_id} of the GGUF vocabulary is not tokenised back to it")


def _swallows_space_after(model_name: str) -> Callable[[str], bool]:
    """Return the test for special tokens that absorb the white space after them.

    Phi-3's do; the file does not say so, and llama.cpp decides it by the model's name.
    """
    name = model_name.lower()
    if "phi-3" in name or "phi3" in name:
        return lambda text: text not in ("<unk>", "<s>", "<|endoftext|>")
    return lambda text: False
