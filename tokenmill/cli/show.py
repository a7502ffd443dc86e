"""`tokenmill show`: what a model is, and what of it fits on this machine. Reads headers only; no weights, no torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tokenmill.arch.cost import gguf_weight_bytes, kv_bytes, kv_bytes_per_token, num_active_parameters, num_parameters
from tokenmill.arch.gguf_file import read_gguf_model
from tokenmill.arch.read import read_json, read_spec
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import MixerSpec, Mla, ModelSpec, MoeSpec, ShortConv
from tokenmill.cli.output import count, print_facts, size
from tokenmill.engine.backends import NATIVE, TRITON, default_kv_dtype
from tokenmill.hardware.machine import probe_machine
from tokenmill.store import DEFAULT_MODEL, ResolvedModel, resolve_model

ROUNDED = "int8"
MAX_TEMPLATE_CHARACTERS = 1 << 20


def command(
    model: str = DEFAULT_MODEL,
    /,
    *,
    template: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Describe a model that is on this machine, and what of it fits here.

    Parameters
    ----------
    model
        Short name, GGUF file, model directory or Hugging Face id.
    template
        Print the chat template itself, nothing else.
    json
        One JSON object for programs.
    """
    resolved = resolve_model(model, allow_pull=False)
    if template:
        print(chat_template(resolved.path) or "")
        return 0
    facts = describe(resolved)
    if json:
        print(msgspec.json.encode(facts).decode())
    else:
        print_facts(_in_words(facts))
    return 0


def describe(resolved: ResolvedModel) -> dict[str, Any]:
    spec = read_spec(resolved.path)
    weights, types = stored_weights(resolved.path)
    return {
        "name": resolved.name,
        "path": str(resolved.path),
        "source": resolved.source,
        "custom": {} if resolved.custom is None else msgspec.to_builtins(resolved.custom),
        "family": spec.family,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "attention": mixers_in_words(spec),
        "mlp": _mlp_in_words(spec),
        "parameters": num_parameters(spec),
        "active_parameters": num_active_parameters(spec),
        "quantisation": types,
        "weight_bytes": weights,
        "max_context": spec.max_context,
        "has_chat_template": chat_template(resolved.path) is not None,
        "kv_bytes_per_token": {dtype: kv_bytes_per_token(spec, dtype) for dtype in _kv_dtypes(spec)},
        "fit": fit(spec, weights),
    }


def stored_weights(path: Path) -> tuple[int, dict[str, int]]:
    """Bytes of the weights, and bytes by stored type."""
    if path.suffix == ".gguf":
        gguf = read_gguf_model(path)
        by_type: Counter[str] = Counter()
        for tensor in gguf.tensors.values():
            by_type[tensor.type] += tensor.num_bytes
        return gguf_weight_bytes(gguf), dict(by_type.most_common())
    total = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return total, {read_spec(path).dtype: total}


def chat_template(path: Path) -> str | None:
    if path.suffix == ".gguf":
        found = read_gguf_model(path).metadata.get("tokenizer.chat_template")
    elif (path / "chat_template.jinja").is_file():
        with open(path / "chat_template.jinja", encoding="utf-8") as file:
            found = file.read(MAX_TEMPLATE_CHARACTERS)
    else:
        config = path / "tokenizer_config.json"
        found = read_json(config).get("chat_template") if config.is_file() else None
    return found if isinstance(found, str) else None


def _kv_dtypes(spec: ModelSpec) -> list[str]:
    """What a CPU and a GPU take by themselves, and what may be asked for"""
    return list(dict.fromkeys((default_kv_dtype(spec, NATIVE), default_kv_dtype(spec, TRITON), ROUNDED)))


def fit(spec: ModelSpec, weights: int) -> list[dict[str, Any]]:
    """For each place the model could run: room after the weights as stored, and conversations of full context in it."""
    machine = probe_machine()
    places = [("memory", machine.memory.available_bytes, default_kv_dtype(spec, NATIVE))]
    places += [(gpu.name, gpu.free_bytes, default_kv_dtype(spec, TRITON)) for gpu in machine.gpus]
    context = min(spec.max_context, 8192)
    rows = []
    for place, free, kv_dtype in places:
        each = kv_bytes(spec, kv_dtype, context)
        conversations = max(free - weights, 0) // each
        row = {"place": place, "free_bytes": free, "fits": conversations > 0, "kv_dtype": kv_dtype}
        rows.append({**row, "context": context, "conversations": conversations})
    return rows


def mixers_in_words(spec: ModelSpec) -> str:
    kinds = Counter(_mixer_in_words(layer.mixer) for layer in spec.layers)
    return "; ".join(f"{layers} × {words}" for words, layers in kinds.items())


def _mixer_in_words(mixer: MixerSpec) -> str:
    if isinstance(mixer, ShortConv):
        return f"short convolution of {mixer.kernel} tokens, {mixer.width} wide"
    if isinstance(mixer, Mla):
        return f"latent attention, {mixer.num_heads} heads of {mixer.head_dim}, {mixer.entry_size} values a token"
    if isinstance(mixer, Recurrent):
        rule = "gated DeltaNet" if mixer.rule == "delta" else "Mamba-2"
        return f"{rule}, {mixer.value_heads} heads of {mixer.key_dim} × {mixer.value_dim}"
    reach = f", window {mixer.window}" if mixer.window else ""
    return f"{mixer.num_heads} heads of {mixer.head_dim}, {mixer.num_kv_heads} KV heads{reach}"


def _mlp_in_words(spec: ModelSpec) -> str:
    mlp = next((layer.mlp for layer in reversed(spec.layers) if layer.mlp is not None), None)
    if mlp is None:
        return "none"
    if isinstance(mlp, MoeSpec):
        return f"{mlp.num_experts} experts of {mlp.expert.intermediate_size}, {mlp.num_active} per token"
    return f"{mlp.intermediate_size} wide, {mlp.activation}"


def _in_words(facts: dict[str, Any]) -> list[tuple[str, str]]:
    active = facts["active_parameters"]
    some_active = f", {count(active)} active per token" if active != facts["parameters"] else ""
    types = ", ".join(f"{name} {size(total)}" for name, total in facts["quantisation"].items())
    custom = facts["custom"]
    rows = [
        ("model", facts["name"]),
        ("path", facts["path"]),
        ("source", facts["source"]),
        *((name, value if isinstance(value, str) else repr(value)) for name, value in custom.items()),
        ("architecture", f"{facts['family']}, {facts['num_layers']} layers, {facts['hidden_size']} wide"),
        ("attention", facts["attention"]),
        ("mlp", facts["mlp"]),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"),
        ("parameters", count(facts["parameters"]) + some_active),
        ("weights", f"{size(facts['weight_bytes'])} ({types})"),
        ("context", f"{facts['max_context']:,} tokens"),
        ("chat template", "yes (--template prints it)" if facts["has_chat_template"] else "none: use run --raw"),
        ("KV cache", _cache_in_words(facts["kv_bytes_per_token"])),
    ]
    return rows + [("fits here" if not index else "", _fit_in_words(row)) for index, row in enumerate(facts["fit"])]


def _cache_in_words(per_token: dict[str, int]) -> str:
    by_default = next(iter(per_token.values()))  # a CPU's
    return f"{size(by_default)} per token, {size(per_token[ROUNDED])} with --kv-dtype {ROUNDED}"


def _fit_in_words(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return f"no: {row['place']} has {size(row['free_bytes'])} free"
    return (
        f"yes: {size(row['free_bytes'])} free in {row['place']}, "
        f"room for about {row['conversations']:,} conversations of {row['context']:,} tokens beside the stored weights"
    )
