"""Load a tokenizer from a Hugging Face model directory.

    tokenizer.json            the vocabulary and how text is split; the only required file
    vocab.json, merges.txt    instead of it, for tokenizers of GPT-2's class (OPT)
    tokenizer_config.json     begin and end tokens, whether they are added, the chat template
    special_tokens_map.json   the same tokens, in older models
    chat_template.jinja       the chat template, in newer models; more in additional_chat_templates/
    generation_config.json    every id that ends a generation (config.json in older models)

For GGUF files see `gguf_tokenizer`, which works on metadata that the caller has read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from tokenmill.errors import DamagedFile, ModelError
from tokenmill.text.tokenizer import Tokenizer, Traits, spelling_of_decoder

_MAX_FILE_BYTES = 256 << 20  # the largest real tokenizer.json is under 40 MB
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model directory. Raises ModelError if tokenizer.json is missing or a file is invalid."""
    config = _json_object(folder / "special_tokens_map.json") | _json_object(folder / "tokenizer_config.json")
    backend = _backend(folder, config)
    _add_listed_tokens(backend, config, folder)
    names = {name: text for name in _NAMES if (text := _token_text(config.get(name)))}
    bos, eos = _id_of(backend, names.get("bos_token")), _id_of(backend, names.get("eos_token"))
    prefix, suffix = _frame(backend, config, bos, eos)
    traits = Traits(
        bos_token_id=bos,
        eos_token_ids=_end_ids(folder, eos),
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_tokens=names,
        chat_templates=_chat_templates(folder, config),
    )
    spelling = spelling_of_decoder(json.loads(backend.to_str())["decoder"] if backend.decoder else None)
    return Tokenizer(backend, spelling, traits)


# ── the vocabulary ─────────────────────────────────────────────────────────────────────────────────────


def _backend(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    is_split = (
        not path.is_file() and config.get("tokenizer_class") in _GPT2_CLASSES and (folder / "vocab.json").is_file()
    )
    if not path.is_file() and not is_split:
        raise ModelError(
            f"{folder} has no tokenizer.json",
            hint="save the tokenizer with the `tokenizers` library's format (transformers: save_pretrained)",
        )
    source = "" if is_split else _read(path)
    try:
        return _byte_level_bpe(folder, config) if is_split else tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception
        named = folder / "vocab.json and merges.txt" if is_split else path
        raise DamagedFile(f"{named} can't be read as a tokenizer: {error}") from error


def _byte_level_bpe(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return GPT-2's tokenizer from its own two files, as transformers converts it."""
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=_flag_or(config.get("add_prefix_space"), False))
    backend.decoder = decoders.ByteLevel()
    texts = dict.fromkeys(text for name in _NAMES if (text := _token_text(config.get(name))))
    backend.add_special_tokens([AddedToken(text, special=True) for text in texts])
    return backend


def _add_listed_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Add the tokens that tokenizer_config.json lists and tokenizer.json lacks; each must get the id it is listed
    with."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise DamagedFile(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is not an object")
    known = backend.get_added_tokens_decoder()
    entries = {_listed_id(text_id, entry, folder): entry for text_id, entry in listed.items()}
    for token_id, entry in sorted(entries.items()):
        if token_id in known:
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(entry["content"]) != token_id:
            raise DamagedFile(f"{folder}: token {entry['content']!r} is listed as {token_id}, which is not free")


def _listed_id(text: str, entry: Any, folder: Path) -> int:
    if not text.isascii() or not text.isdigit() or not isinstance(entry, dict) or _token_text(entry) is None:
        raise DamagedFile(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder[{text[:40]!r}] is no token")
    return int(text)


def _frame(
    backend: tokenizers.Tokenizer, config: dict[str, Any], bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the prefix and suffix tokens that make the tokenizer follow `add_bos_token` and `add_eos_token`.

    tokenizer.json may add either by itself; an explicit setting takes precedence, as in transformers.
    """
    around = backend.encode("", add_special_tokens=True).ids
    has_bos, has_eos = bos is not None and bos in around[:1], eos is not None and eos in around[-1:] and around != [bos]
    wants_bos = _flag_or(config.get("add_bos_token"), has_bos) and bos is not None
    wants_eos = _flag_or(config.get("add_eos_token"), has_eos) and eos is not None
    if (has_bos and not wants_bos) or (has_eos and not wants_eos):
        backend.post_processor = processors.Sequence([])
        has_bos = has_eos = False
    prefix = (bos,) if wants_bos and not has_bos and bos is not None else ()
    suffix = (eos,) if wants_eos and not has_eos and eos is not None else ()
    return prefix, suffix


def _flag_or(setting: Any, default: bool) -> bool:
    return setting if isinstance(setting, bool) else default


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _token_text(entry: Any) -> str | None:
    """Return the text of a token that is given as a string or as an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


# ── end tokens, templates, reading files ───────────────────────────────────────────────────────────────


def _end_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    listed = _json_object(folder / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = _json_object(folder / "config.json").get("eos_token_id")
    others = listed if isinstance(listed, list) else [listed]
    ids = [] if eos is None else [eos]
    ids += [token_id for token_id in others if isinstance(token_id, int) and token_id >= 0]
    return tuple(dict.fromkeys(ids))


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    templates = _listed_templates(config.get("chat_template"))
    templates |= _listed_templates(_json_object(folder / "chat_template.json").get("chat_template"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read(folder / "chat_template.jinja")
    return templates


def _listed_templates(entry: Any) -> dict[str, str]:
    if isinstance(entry, str):
        return {"default": entry}
    named = [item for item in entry if isinstance(item, dict)] if isinstance(entry, list) else []
    pairs = [(item.get("name"), item.get("template")) for item in named]
    return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is not JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} contains {type(value).__name__}, expected an object")
    return value


def _read(path: Path) -> str:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise DamagedFile(f"{path} is larger than {_MAX_FILE_BYTES} bytes, too large for a tokenizer file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path} is not UTF-8: {error}") from error
