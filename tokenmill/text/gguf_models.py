"""The vocabulary kinds of GGUF files, built from `tokenizers` parts so that encoding runs in Rust.

"llama"   SentencePiece BPE: no word borders; of all neighbouring pairs that form a token, the one with
          the best score merges first. Characters outside the vocabulary become byte tokens <0xNN>.
"gpt2"    byte-level BPE: a listed order of merges inside words that a pre-tokenizer cut out.
"gemma4"  SentencePiece spelling with a listed order of merges.
"bert"    WordPiece: longest match from the left; "▁" opens a word in the file, "##" continues it in the library.
"t5"      Unigram: the cut with the best sum of scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from tokenmill.text.gguf_fields import PREFIX, TokenType, VocabFields, VocabTokens, damaged
from tokenmill.text.pieces import BYTE_LEVEL, SPACE_MARK, WORDPIECE, Spelling, sentencepiece
from tokenmill.text.pretokenizers import pre_tokenizer


@dataclass(frozen=True)
class BuiltModel:
    """A backend that knows no special tokens yet, and what its kind does where the file is silent."""

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
    """Every way to make a token of two tokens, best score first: the order in which SentencePiece merges."""
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
    # Very old files name neither token; 11 is Falcon's <|endoftext|>, for which the kind was first written.
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
        raise damaged(f"{PREFIX}tokens holds a word twice")
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
        raise damaged(f"{PREFIX}precompiled_charsmap can't be read: {error}") from error


def _as_bytes(numbers: list[int]) -> bytes:
    if not all(isinstance(number, int) and -128 <= number < 256 for number in numbers):
        raise damaged(f"{PREFIX}precompiled_charsmap holds something that is not a byte")
    return bytes(number & 0xFF for number in numbers)
