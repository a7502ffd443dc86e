"""Pre-tokenizers of byte-level BPE vocabularies, by their names in GGUF files: how text is split into words before
merging.

A rule is a list of patterns, each applied to the pieces that the previous one produced; both the matches of a pattern
and the text between them become pieces. Merges never cross pieces, so a wrong pattern gives wrong ids without any
error. A name that is not in the table is therefore refused.

Patterns are those of the vocabularies' own tokenizer.json where that is known, in Oniguruma's dialect.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from tokenmill.errors import UnsupportedModel

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_MINICPM5 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Words by letter case: OpenAI's o200k and its relatives.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(contractions: str, digits: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_UPPER}*{_LOWER}+{contractions}|{lead}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_O200K = _by_case(_CONTRACTIONS + "?", r"\p{N}{1,3}")
_TEKKEN = _by_case("", r"\p{N}")
_DIGIT_GROUPS = r"\d{1,3}(?=(?:\d{3})*\b)"

# DeepSeek splits text by script, one script after another.
# Cased letters are given by code point because several of them would change under normalisation.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~" "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002" "]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_GPT2_DIGITS = (r"\p{N}", _GPT2)
_FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)


@dataclass(frozen=True)
class PreTokenizer:
    """One pre-tokenization rule.

    `whole_words`: a piece that is itself a token is not merged from its parts. `adds_bos` and `adds_sep` are the
    defaults of such vocabularies where a file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    adds_sep: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _named(rule: PreTokenizer, *names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, rule)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **_named(PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    **_named(
        PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    **_named(PreTokenizer((_LLAMA3,)), "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    **_named(
        PreTokenizer((_GPT2,)),
        *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0", "mellum"),
        *("modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    ),
    **_named(PreTokenizer((_GPT2,), adds_sep=True), "jina-v1-en", "jina-v2-code", "roberta-bpe"),
    **_named(
        PreTokenizer(_GPT2_DIGITS),
        *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    **_named(
        PreTokenizer((_QWEN2,)),
        *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    ),
    **_named(PreTokenizer((_QWEN35,)), "qwen35"),
    **_named(
        PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _EAST_ASIAN, r"\p{N}+")),
        "deepseek-llm",
    ),
    **_named(PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")), "deepseek-coder"),
    **_named(PreTokenizer(_DEEPSEEK3), "deepseek-v3", "hunyuan-dense", "joyai-llm"),
    **_named(PreTokenizer((_FALCON_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    **_named(PreTokenizer((_BLOOM,)), "poro-chat", "bloom", "gpt3-finnish"),
    **_named(PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    **_named(PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True), "tekken"),
    **_named(PreTokenizer((_O200K,)), "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    **_named(PreTokenizer((_O200K,), whole_words=True), "granite-embed-multi-97m"),
    **_named(PreTokenizer((_DIGIT_GROUPS, _O200K)), "tiny_aya", "cohere2moe"),
    **_named(PreTokenizer((_BAILING,)), "bailingmoe", "bailingmoe2", "llada-moe"),
    **_named(PreTokenizer((_SEED_CODER,)), "seed-coder"),
    **_named(PreTokenizer((_EXAONE_MOE,)), "exaone-moe"),
    **_named(PreTokenizer((r"\p{N}{1,3}", _MINICPM5), whole_words=True), "minicpm5"),
    **_named(PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)), "laguna"),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"the GGUF vocabulary asks for the pre-tokenizer {name!r}, which is not implemented",
            hint="use the model's Hugging Face directory with its tokenizer.json instead",
        )
    return rule
