"""GGUF vocabularies against llama.cpp's own vocabulary tests, and damaged metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tokenmill.arch.gguf_file import read_gguf
from tokenmill.errors import ModelError, UnsupportedModel
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.pretokenizers import PRE_TOKENIZERS
from tokenmill.text.tokenizer import byte_alphabet

REFERENCED = [
    *("bert-bge", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "refact"),
    "starcoder",
]


def reference_cases(shared: Path, name: str) -> list[tuple[str, list[int]]]:
    stem = shared / "vocab" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().split("\n")
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", REFERENCED)
def test_ids_equal_llama_cpp(shared_dir: Path, name: str) -> None:
    tokenizer = tokenizer_from_gguf(read_gguf(shared_dir / "vocab" / f"ggml-vocab-{name}.gguf").metadata)
    cases = reference_cases(shared_dir, name)
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == ids, text
        if name != "bert-bge":  # WordPiece forgets case and spacing
            assert tokenizer.decode(ids) == text


def test_vocabularies_without_a_reference_round_trip(shared_dir: Path) -> None:
    for name in ("baichuan", "gpt-neox"):
        tokenizer = tokenizer_from_gguf(read_gguf(shared_dir / "vocab" / f"ggml-vocab-{name}.gguf").metadata)
        text = "Hello wörld, 你好 🦙\n\n  3.14"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm2(smollm2_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(read_gguf(smollm2_path).metadata)
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.encode(turn)[0] == 1 and 2 in tokenizer.encode(turn)
    assert 1 not in tokenizer.encode(turn, parse_special=False)
    assert tokenizer.decode(tokenizer.encode(turn, parse_special=False)) == turn
    assert tokenizer.decode(tokenizer.encode(turn)) == "user\nHi\n"
    assert tokenizer.decode(tokenizer.encode(turn), skip_special_tokens=False) == turn
    assert tokenizer.eos_token_ids[0] == 2 and 0 in tokenizer.eos_token_ids
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.chat_template is not None and "im_start" in tokenizer.chat_template


def test_phi3_special_tokens_swallow_space(shared_dir: Path) -> None:
    tokenizer = tokenizer_from_gguf(read_gguf(shared_dir / "vocab" / "ggml-vocab-phi-3.gguf").metadata)
    assert tokenizer.encode("<|user|> \n x") == tokenizer.encode("<|user|>x")
    assert tokenizer.encode("")[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_every_character(name: str) -> None:
    text = "I'm ΆΈ naïve,\t\r\n\n  12345 你好世界 мир! ก็ 🦙 ok.)"
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    bytes_of = {char: byte for byte, char in byte_alphabet().items()}
    assert bytes(bytes_of[char] for piece, _ in pieces for char in piece).decode() == text
    assert len(pieces) > 5


def small_byte_level(**changes: Any) -> dict[str, Any]:
    tokens = [*byte_alphabet().values(), "he", "ll", "hell", "<|end|>", "<|tool|>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 259,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def test_control_tokens_are_parsed_on_demand_and_user_defined_ones_always() -> None:
    tokenizer = tokenizer_from_gguf(small_byte_level(add_bos_token=True))
    ids = tokenizer.encode("hell<|end|><|tool|>")
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["<|end|>", "hell", "<|end|>", "<|tool|>"]
    literal = tokenizer.encode("<|end|><|tool|>", add_special_tokens=False, parse_special=False)
    assert literal[-1] == 260 and 259 not in literal
    assert tokenizer.decode([259, 256, 260]) == "he<|tool|>"
    assert 259 in tokenizer.special_ids and 260 not in tokenizer.special_ids


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "tokenizer.ggml.model"),
        ({"model": 3}, "expected a string"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "is empty"),
        ({"tokens": ["a", "b", "a"]}, "'a' twice"),
        ({"tokens": ["a", 3]}, r"tokens\[1\]"),
        ({"tokens": "abc"}, "expected an array"),
        ({"tokens": ["a", "b" * 2000]}, "2000 characters"),
        ({"token_type": [1, 2]}, "2 entries"),
        ({"token_type": ["x"] * 261}, "not a number"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["he"]}, r"merges\[0\]"),
        ({"merges": ["h e", "he zz"]}, r"merges\[1\]"),
        ({"eos_token_id": 4000}, "below 261"),
        ({"eos_token_id": "two"}, "below 261"),
        ({"add_bos_token": 1}, "expected true or false"),
        ({"add_sep_token": True, "eos_token_id": 99999}, "below 261"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "t5", "scores": [0.0] * 261, "precompiled_charsmap": [1]}, "precompiled_charsmap"),
    ],
)
def test_damaged_metadata_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        tokenizer_from_gguf(small_byte_level(**changes))


def test_unknown_variants_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'from-the-future'"):
        tokenizer_from_gguf(small_byte_level(pre="from-the-future"))
    with pytest.raises(UnsupportedModel, match="'rwkv'"):
        tokenizer_from_gguf(small_byte_level(model="rwkv"))


def test_an_unknown_word_may_have_any_name() -> None:
    tokens = ["[CLS]", "[SEP]", "huh", "\u2581a"]
    metadata = {"model": "bert", "tokens": tokens, "token_type": [3, 3, 1, 1], "merges": None, "pre": None}
    ids = {"cls_token_id": 0, "bos_token_id": 0, "seperator_token_id": 1, "eos_token_id": 1, "unknown_token_id": 2}
    assert tokenizer_from_gguf(small_byte_level(**metadata, **ids)).encode("a zzz") == [0, 3, 2, 1]


def test_unigram_equals_the_vocabulary_it_was_trained_as() -> None:
    trained = Backend(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(["the cat sat on the mat", "a dog and a cat ran to the mat", "that hat"] * 5, trainer)

    vocab = json.loads(trained.to_str())["model"]["vocab"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in vocab],
        "tokenizer.ggml.scores": [score for _, score in vocab],
        "tokenizer.ggml.token_type": [3, 3, 2] + [1] * (len(vocab) - 3),
    }
    tokenizer = tokenizer_from_gguf(metadata)
    for text in ("the cat ran", "that dog  sat", "a hat"):
        ids = trained.encode(text).ids
        assert tokenizer.encode(text) == [*ids, 1]
        assert tokenizer.decode(ids) == trained.decode(ids) == text


def test_gemma4_merges_with_space_marks_and_byte_fallback() -> None:
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "\n",
        "\n\n",
    ]
    tokenizer = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3, 3] + [6] * 256 + [1] * 6,
            "tokenizer.ggml.merges": ["▁ a", "\n \n"],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
        }
    )
    ids = tokenizer.encode("b a\n\né")
    assert [tokens[token_id] for token_id in ids] == ["<bos>", "b", "▁a", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "b a\n\né"
