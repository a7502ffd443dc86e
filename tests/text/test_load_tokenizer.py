"""Tokenizers from Hugging Face directories, compared with transformers."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_models import fetched_model
from tokenmill.arch.gguf_file import read_gguf
from tokenmill.errors import DamagedFile, ModelError
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.load import load_tokenizer
from tokenmill.text.template import CHATML, ChatTemplate
from tokenmill.text.tokenizer import BYTE_LEVEL, byte_alphabet, byte_level_bytes, sentencepiece_bytes, wordpiece_bytes

TEXTS = ["word né 🦙 " * 1000, "", "Hello world", " two  spaces ", "né 🦙 你好", "<s>in text</s>", "a\nb\tc"]


def test_stories_equals_transformers(stories_dir: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(stories_dir)
    ours = load_tokenizer(stories_dir)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (1, [2], 512)
    assert ours.chat_template is None


def test_other_threads_go_on_while_a_long_text_is_tokenised(stories_dir: Path) -> None:
    """The library holds the GIL in `encode`, from beginning to end, and releases it in `encode_batch`."""
    tokenizer = load_tokenizer(stories_dir)
    working = threading.Thread(target=tokenizer.encode, args=("Once upon a time there was a miller. " * 40_000,))
    working.start()
    num_turns = 0
    while working.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 5


def test_stories_token_counts(shared_dir: Path, stories_dir: Path) -> None:
    anchors = json.loads((shared_dir / "goldens" / "stories260K" / "anchors.json").read_text())
    tokenizer = load_tokenizer(stories_dir)
    for anchor in anchors["prompt_token_counts"]:
        assert len(tokenizer.encode(anchor["prompt"])) == anchor["tokens"]
    template = ChatTemplate(CHATML, tokenizer.special_tokens)
    for anchor in anchors["chatml_token_counts"]:
        turns = [{"role": role, "content": anchor[role]} for role in ("system", "user")]
        assert len(tokenizer.encode(template.render(turns))) == anchor["tokens"]


def test_a_bert_directory_keeps_long_texts(shared_dir: Path) -> None:
    folder = fetched_model(shared_dir, "minilm")
    tokenizer = load_tokenizer(folder if folder.is_dir() else folder.parent)
    ids = tokenizer.encode("word " * 600)  # its file asks for truncation at 128 and for padding
    assert len(ids) == 602 and ids[0] == 101 and ids[-1] == 102
    assert tokenizer.encode("hi") == [101, 7632, 102]


@pytest.fixture
def copied(stories_dir: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(stories_dir / name, tmp_path / name)
    return tmp_path


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_settings_of_the_directory_act(copied: Path) -> None:
    (copied / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    configure(copied, add_bos_token=False, add_eos_token=True, chat_template=[{"name": "tool_use", "template": "T"}])
    tokenizer = load_tokenizer(copied)
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [*plain, 2]
    assert tokenizer.eos_token_ids == [2, 7]
    assert tokenizer.chat_templates == {"tool_use": "T"} and tokenizer.chat_template is None
    (copied / "chat_template.jinja").write_text("J")
    configure(copied, bos_token={"content": "<s>", "lstrip": False}, add_bos_token=True, add_eos_token=False)
    tokenizer = load_tokenizer(copied)
    assert tokenizer.encode("hi") == [1, *plain]
    assert tokenizer.chat_template == "J" and tokenizer.special_tokens["bos_token"] == "<s>"


def test_listed_tokens_are_added_on_their_ids(copied: Path) -> None:
    configure(copied, added_tokens_decoder={"512": {"content": "<|tool|>", "special": True}})
    tokenizer = load_tokenizer(copied)
    assert tokenizer.encode("<|tool|>", add_special_tokens=False) == [512] and 512 in tokenizer.special_ids
    configure(copied, added_tokens_decoder={"900": {"content": "<|far|>", "special": True}})
    with pytest.raises(DamagedFile, match="listed as 900"):
        load_tokenizer(copied)
    for wrong in ({"many": {"content": "a"}}, {"512": "a"}, {"512": {"special": True}}, {"512": {"content": ""}}):
        configure(copied, added_tokens_decoder=wrong)
        with pytest.raises(DamagedFile, match="is no token"):
            load_tokenizer(copied)


def test_damaged_directories(copied: Path) -> None:
    (copied / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DamagedFile, match=r"tokenizer_config\.json contains list"):
        load_tokenizer(copied)
    for nonsense in ("{nonsense", "[" * 100_000):
        (copied / "tokenizer_config.json").write_text(nonsense)
        with pytest.raises(DamagedFile, match="not JSON"):
            load_tokenizer(copied)
    (copied / "tokenizer_config.json").write_text('{"chat_template": [{"template": "a"}, 3, {"name": "b"}]}')
    assert load_tokenizer(copied).chat_templates == {}
    (copied / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DamagedFile, match=r"tokenizer\.json"):
        load_tokenizer(copied)
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(copied)


def test_spellings() -> None:
    assert {byte_level_bytes(char): byte for byte, char in byte_alphabet().items()} == {
        bytes([byte]): byte for byte in range(256)
    }
    assert byte_level_bytes("ĠcafÃ©") == b" caf\xc3\xa9"
    assert byte_level_bytes("two words") == b"two words"  # not in the alphabet: plain text
    assert sentencepiece_bytes("▁caf") == b" caf" and sentencepiece_bytes("<0xC3>") == b"\xc3"
    assert sentencepiece_bytes("<0xZZ>") == b"<0xZZ>"
    assert wordpiece_bytes("##s") == b"s" and wordpiece_bytes("cat") == b" cat"


def test_directory_and_gguf_of_one_vocabulary_agree(shared_dir: Path, tmp_path: Path) -> None:
    """A GGUF vocabulary, saved as tokenizer.json, is recognised and spelled alike."""
    for name in ("gpt-2", "llama-spm"):
        from_gguf = tokenizer_from_gguf(read_gguf(shared_dir / "vocab" / f"ggml-vocab-{name}.gguf").metadata)
        from_gguf.backend.save(str(tmp_path / "tokenizer.json"))
        from_folder = load_tokenizer(tmp_path)
        assert from_folder.spelling == from_gguf.spelling and from_folder.spelling is not None
        assert (name == "gpt-2") == (from_folder.spelling is BYTE_LEVEL)
        ids = range(0, from_gguf.vocab_size, 371)
        assert [from_folder.token_bytes(token_id) for token_id in ids] == [from_gguf.token_bytes(i) for i in ids]
        # a whole vocabulary's bytes, each valid text among them read back by the library itself
        for token_id in ids:
            text = from_folder.token_text(token_id)
            assert "\ufffd" in text or from_gguf.backend.decode([3, token_id], skip_special_tokens=False).endswith(text)


def test_a_tokenizer_of_one_user_reads_literally_without_a_copy(stories_dir: Path) -> None:
    tokenizer = load_tokenizer(stories_dir)
    for text in ("Once <s> upon </s>", "a", "<unk>"):
        expected = load_tokenizer(stories_dir).encode(text, parse_special=False)
        tokenizer.read_literally()
        assert tokenizer.encode(text, parse_special=False) == expected == tokenizer.encode(text)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_vocabularies_of_gpt2_s_own_files(adds_bos: bool, tmp_path: Path) -> None:
    """OPT's files: vocab.json and merges.txt, and a begin token that only the config asks for."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Tokenizer

    text = "The tokenizer's words: 1234 numbers, été, naïve; 'tis don't  two spaces\n\ttab"
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>"]
    trained.train_from_iterator([text] * 4, vocab_size=320, special_tokens=special, show_progress=False)
    trained.save_model(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": adds_bos}))
    theirs, ours = GPT2Tokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for piece in (text, text + "</s>" + text, " leading", ""):
        ids = ours.encode(piece, add_special_tokens=False)
        assert ids == theirs.encode(piece, add_special_tokens=False)
        assert ours.encode(piece) == [2] * adds_bos + ids


def test_other_classes_need_a_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "merges.txt").write_text("a b c d")
    with pytest.raises(DamagedFile, match=r"merges\.txt"):
        load_tokenizer(tmp_path)
