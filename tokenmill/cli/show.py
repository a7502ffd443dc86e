"""`tokenmill show`: describe a model and how it fits this machine. Reads only headers; needs neither weights nor
torch."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tokenmill.arch.cost import (
    gguf_weight_bytes,
    kv_bytes,
    kv_bytes_per_token,
    num_active_parameters,
    num_parameters,
)
from tokenmill.arch.families import BY_MODEL_TYPE
from tokenmill.arch.gguf_file import read_gguf_model
from tokenmill.arch.mtp import has_mtp_head
from tokenmill.arch.outline import outline_of
from tokenmill.arch.outlines import MISSING, outline_from_hf
from tokenmill.arch.quantization import read_quantization
from tokenmill.arch.read import quantization_config, read_json, read_spec
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import MixerSpec, Mla, ModelSpec, MoeSpec, ShortConv, WindowedMqa
from tokenmill.cli.output import count, print_facts, size
from tokenmill.config import EngineConfig
from tokenmill.engine.backends import NATIVE, REFERENCE, TRITON, Backend, default_kv_dtype
from tokenmill.errors import UnsupportedModel
from tokenmill.hardware.machine import probe_machine
from tokenmill.ops import cpu as native_kernels
from tokenmill.ops import triton as triton_kernels
from tokenmill.ops.compute_request import ComputeRequest, caches_latents
from tokenmill.report.units import duration
from tokenmill.store import DEFAULT_MODEL, ResolvedModel, resolve_model
from tokenmill.store.catalog import find_entry

ROUNDED = "int8"
PRICED_DEVICE = "H200 SXM"  # for which `show` tells what a model costs; `plan` does for any device
NO_KERNELS = "no: "
MAX_TEMPLATE_CHARACTERS = 1 << 20


def command(
    model: str = DEFAULT_MODEL,
    /,
    *,
    template: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Describe a model: its architecture, its kernels or what is missing, and how it fits this machine.

    Parameters
    ----------
    model
        Short name, GGUF file, model directory, config.json or Hugging Face id.
    template
        Print only the chat template.
    json
        Print one JSON object.
    """
    resolved = resolve_model(model, allow_pull=False)
    if template:
        print(chat_template(resolved.path) or "")
        return 0
    try:
        facts = describe(resolved)
        facts |= {"license": license_of(resolved), "speed_here": speed_here(resolved)}
        if resolved.path.suffix == ".json" and not facts["kernels"]["NVIDIA GPU"].startswith(NO_KERNELS):
            facts["costs"] = cost_of(resolved.path)
        words = _in_words(facts)
    except UnsupportedModel as error:
        facts = describe_planned(resolved, error)
        words = _planned_in_words(facts)
    if json:
        print(msgspec.json.encode(facts).decode())
    else:
        print_facts(words)
    return 0


def describe(resolved: ResolvedModel) -> dict[str, Any]:
    spec = read_spec(resolved.path)
    weights, types = stored_weights(resolved.path)
    needed = weights or bytes_by_config(resolved.path)
    return {
        "name": resolved.name,
        "path": str(resolved.path),
        "source": resolved.source,
        "custom": {} if resolved.custom is None else msgspec.to_builtins(resolved.custom),
        "family": spec.family,
        "num_layers": spec.num_layers,
        "num_further_token_layers": spec.num_extra_layers,
        "drafts_by_own_head": bool(spec.num_extra_layers) and has_mtp_head(spec),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "attention": mixers_in_words(spec),
        "mlp": _mlp_in_words(spec),
        "parameters": num_parameters(spec),
        "active_parameters": num_active_parameters(spec),
        "quantised_as": quantised_as(resolved.path),
        "quantisation": types,
        "weight_bytes": weights,
        "needed_bytes": needed,
        "max_context": spec.max_context,
        "has_chat_template": chat_template(resolved.path) is not None,
        "kv_bytes_per_token": {dtype: kv_bytes_per_token(spec, dtype) for dtype in _kv_dtypes(spec)},
        "runs": True,
        "kernels": kernels_for(spec),
        "fit": fit(spec, needed),
    }


def bytes_by_config(path: Path) -> int:
    """Return the bytes of the weights that a config describes, in its data type, on a CPU."""
    from tokenmill.planner.model import model_at, model_from_config

    model = model_from_config(path, path.stem) if path.suffix == ".json" else model_at(path, path.name)
    return model.weights("auto").total


def license_of(resolved: ResolvedModel) -> str | None:
    """Return the licence from the catalog or the file; None if unknown."""
    entry = find_entry(resolved.name)
    if entry is not None:
        return entry.license
    if resolved.path.suffix != ".gguf":
        return None
    told = read_gguf_model(resolved.path).metadata.get("general.license")
    return told if isinstance(told, str) else None


def speed_here(resolved: ResolvedModel) -> dict[str, Any] | None:
    """Return the planner's prediction of the speed on this machine; None without weights."""
    from tokenmill.planner.serving import serving_plan

    if resolved.path.suffix == ".json":
        return None
    plan = serving_plan(EngineConfig(), resolved.path, resolved.name)
    return {"device": plan.device.name, "input_len": plan.question.input_len, "ttft_s": plan.ttft_s,
            "tpot_s": plan.tpot_s}  # fmt: skip


def cost_of(config: Path) -> dict[str, Any] | None:
    """Return the predicted price of a model's tokens on one to eight devices of a kind, on the cheapest number of them;
    None if not even eight hold it."""
    from tokenmill.planner.model import model_from_config
    from tokenmill.planner.plan import Question
    from tokenmill.planner.which import rank_devices

    (option,) = rank_devices(model_from_config(config, config.stem), Question(), [PRICED_DEVICE])
    if option.plan is None or option.plan.best is None or option.plan.price is None:
        return None
    return {
        "device": option.device,
        "num_devices": option.plan.question.split.num_devices,
        "usd_per_hour": option.plan.price.usd_per_hour,
        "usd_per_million_output": option.plan.price.usd_per_million_output,
    }


def _cost_in_words(facts: dict[str, Any]) -> str:
    everything = f"tokenmill plan {shlex.quote(facts['path'])}: memory, speed and price on any device"
    if "costs" not in facts:
        return everything
    found = facts["costs"]
    if found is None:
        return f"eight {PRICED_DEVICE} do not hold it; {everything}"
    devices = f"{found['num_devices']} × {found['device']}, ${found['usd_per_hour']:.2f} an hour"
    return f"{devices}: ${found['usd_per_million_output']:.2f} per million output tokens; {everything}"


def _speed_in_words(speed: dict[str, Any]) -> str:
    """Format predicted TTFT and tokens per second."""
    prompt = f"about {duration(speed['ttft_s'])} for a prompt of {speed['input_len']} tokens"
    return f"{prompt}, then {1 / speed['tpot_s']:,.0f} tokens/s ({speed['device']})"


def kernels_for(spec: ModelSpec) -> dict[str, str]:
    """Return the kernels that compute a model on each kind of device; for the slow torch reference, or if there are
    none, with the reason."""
    dtype = TRITON.devices[0].compute_dtype(spec, False)
    on_cpu = ComputeRequest(spec, "cpu", "float32", default_kv_dtype(spec, NATIVE))
    on_gpu = ComputeRequest(spec, "cuda", dtype, default_kv_dtype(spec, TRITON))
    return {
        "CPU": _kernels_in_words(NATIVE, native_kernels.unsupported_reason(on_cpu), on_cpu),
        "NVIDIA GPU": _kernels_in_words(TRITON, triton_kernels.unsupported_reason(on_gpu), on_gpu),
    }


def _kernels_in_words(backend: Backend, reason: str | None, request: ComputeRequest) -> str:
    if reason is None:
        return backend.title
    if request.device != "cpu" and request.spec.recurrences:  # as the reference refuses them
        return f"{NO_KERNELS}{reason}"
    return f"{REFERENCE.title}, slow: {reason}"


def describe_planned(resolved: ResolvedModel, error: UnsupportedModel) -> dict[str, Any]:
    """Describe a model that the engine does not run: what is missing, and its size."""
    config = resolved.path if resolved.path.suffix == ".json" else resolved.path / "config.json"
    facts: dict[str, Any] = {"name": resolved.name, "path": str(resolved.path), "runs": False}
    if not config.is_file():
        return {**facts, "missing": error.message}
    plain = {key: value for key, value in read_json(config).items() if key != "quantization_config"}
    model_type = str(plain.get("model_type"))
    noun = MISSING.get(model_type) if model_type not in BY_MODEL_TYPE else None
    facts["missing"] = error.message if noun is None else f"{error.message}: {noun}"
    try:
        model = outline_from_hf(plain)
    except UnsupportedModel:
        return facts
    outline = outline_of(model)
    return {
        **facts,
        "family": outline.family,
        "num_layers": outline.num_layers,
        "hidden_size": outline.hidden_size,
        "vocab_size": outline.vocab_size,
        "parameters": num_parameters(model),
        "active_parameters": num_active_parameters(model),
        "max_context": outline.max_context,
        "kv_bytes_per_token": {"bfloat16": kv_bytes_per_token(model, "bfloat16")},
        "costs": cost_of(config),
    }


def _planned_in_words(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("model", facts["name"]), ("path", facts["path"]), ("runs", f"no: {facts['missing']}")]
    if "parameters" not in facts:
        return rows
    cache = facts["kv_bytes_per_token"]
    return [
        *rows,
        ("architecture", f"{facts['family']}, {facts['num_layers']} layers, {facts['hidden_size']} wide"),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"),
        ("parameters", _parameters_in_words(facts)),
        ("weights", f"{size(2 * facts['parameters'])} in bfloat16, about {size(facts['parameters'] // 2)} in 4 bits"),
        ("context", f"{facts['max_context']:,} tokens"),
        ("KV cache", f"{size(cache['bfloat16'])} per token in bfloat16"),
        ("costs", _cost_in_words(facts)),
    ]


def _parameters_in_words(facts: dict[str, Any]) -> str:
    active = facts["active_parameters"]
    some_active = f", {count(active)} active per token" if active != facts["parameters"] else ""
    return count(facts["parameters"]) + some_active


def stored_weights(path: Path) -> tuple[int, dict[str, int]]:
    """Return the bytes of the weights, in total and by stored type."""
    if path.suffix == ".gguf":
        gguf = read_gguf_model(path)
        by_type: Counter[str] = Counter()
        for tensor in gguf.tensors.values():
            by_type[tensor.type] += tensor.num_bytes
        return gguf_weight_bytes(gguf), dict(by_type.most_common())
    total = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
    return total, {quantised_as(path) or read_spec(path).dtype: total}


def quantised_as(path: Path) -> str | None:
    """Return the quantisation that a checkpoint's config declares; None: none, or a GGUF file."""
    described = path if path.suffix == ".json" else path / "config.json"
    config = quantization_config(described) if described.is_file() else None
    return read_quantization(config).method if config else None


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
    """Return the default KV cache types of a CPU and a GPU, and the optional one of half their size, if the model's
    cache can be stored in it."""
    optional = () if caches_latents(spec) else (ROUNDED,)
    return list(dict.fromkeys((default_kv_dtype(spec, NATIVE), default_kv_dtype(spec, TRITON), *optional)))


def fit(spec: ModelSpec, weights: int) -> list[dict[str, Any]]:
    """Return for each device the memory left after the weights, and how many conversations of full context fit in
    it."""
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
    kinds = Counter(" beside ".join(map(_mixer_in_words, layer.mixers)) for layer in spec.layers)
    return "; ".join(f"{layers} × {words}" for words, layers in kinds.items())


def _mixer_in_words(mixer: MixerSpec) -> str:
    if isinstance(mixer, ShortConv):
        return f"short convolution of {mixer.kernel} tokens, {mixer.width} wide"
    if isinstance(mixer, Mla):
        words = f"latent attention, {mixer.num_heads} heads of {mixer.head_dim}, {mixer.entry_size} values per token"
        if mixer.indexer is not None:
            return f"{words}, over the {mixer.indexer.top_k} tokens chosen by an indexer"
        return words if not mixer.is_sparse else f"{words}, over the tokens chosen by an earlier layer's indexer"
    if isinstance(mixer, WindowedMqa):
        words = f"{mixer.num_heads} heads of {mixer.head_dim} over one key, window {mixer.window}"
        rate = mixer.compression and mixer.compression.rate
        return words if rate is None else f"{words}, compressed entries of {rate} tokens before"
    if isinstance(mixer, Recurrent):
        rule = "gated DeltaNet" if mixer.rule == "delta" else "Mamba-2"
        if mixer.inner is not None:
            return f"Mamba-1, {mixer.values_size} channels with {mixer.key_dim} states"
        if mixer.has_channel_decays:
            rule = "delta rule with a decay per channel"
        return f"{rule}, {mixer.value_heads} heads of {mixer.key_dim} × {mixer.value_dim}"
    reach, index = f", window {mixer.window}" if mixer.window else "", mixer.block_indexer
    if index is not None:
        reach = f", over {index.top_k} blocks of {index.block_size} tokens chosen by an indexer"
    return f"{mixer.num_heads} heads of {mixer.head_dim}, {mixer.num_kv_heads} KV heads{reach}"


def _mlp_in_words(spec: ModelSpec) -> str:
    mlp = next((layer.mlp for layer in reversed(spec.layers) if layer.mlp is not None), None)
    if mlp is None:
        return "none"
    if isinstance(mlp, MoeSpec):
        return f"{mlp.num_experts} experts of {mlp.expert.intermediate_size}, {mlp.num_active} per token"
    return f"{mlp.intermediate_size} wide, {mlp.activation}"


def _in_words(facts: dict[str, Any]) -> list[tuple[str, str]]:
    types = ", ".join(f"{name} {size(total)}" for name, total in facts["quantisation"].items())
    custom, has_weights, needed = facts["custom"], bool(facts["weight_bytes"]), size(facts["needed_bytes"])
    template = "yes (--template prints it)" if facts["has_chat_template"] else "none: use `run --raw`"
    rows = [
        ("model", facts["name"]),
        ("path", facts["path"]),
        ("source", facts["source"]),
        *([("licence", facts["license"])] if facts["license"] else []),
        *((name, value if isinstance(value, str) else repr(value)) for name, value in custom.items()),
        ("architecture", f"{facts['family']}, {facts['num_layers']} layers, {facts['hidden_size']} wide"),
        ("attention", facts["attention"]),
        ("mlp", facts["mlp"]),
        *_further_in_words(facts["num_further_token_layers"], facts["drafts_by_own_head"]),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"),
        ("parameters", _parameters_in_words(facts)),
        *([("quantised", facts["quantised_as"])] if facts["quantised_as"] else []),
        ("weights", f"{size(facts['weight_bytes'])} ({types})" if has_weights else f"{needed}, not downloaded"),
        ("context", f"{facts['max_context']:,} tokens"),
        *([("chat template", template)] if has_weights else []),
        ("KV cache", _cache_in_words(facts["kv_bytes_per_token"])),
        *((f"runs on a {'CPU' if device == 'CPU' else 'GPU'}", by) for device, by in facts["kernels"].items()),
    ]
    fits = [_fit_in_words(row, needed) for row in facts["fit"]]
    rows += [("fits here" if not index else "", words) for index, words in enumerate(fits)]
    if facts["speed_here"] is not None:
        rows.append(("speed here", _speed_in_words(facts["speed_here"])))
    if not has_weights:
        return [*rows, ("costs", _cost_in_words(facts))]
    raw = "" if facts["has_chat_template"] else " --raw"
    return [*rows, ("try", f'tokenmill run {shlex.quote(facts["name"])}{raw} "Why is the sky blue?"')]


def _further_in_words(count: int, proposes_drafts: bool) -> list[tuple[str, str]]:
    layers = f"{count} layer{'s' * (count > 1)} in the file"
    use = "used on a CPU by --speculate mtp" if proposes_drafts else "not used for drafts yet"
    return [("MTP head", f"{layers}; {use}")] if count else []


def _cache_in_words(per_token: dict[str, int]) -> str:
    by_default = f"{size(next(iter(per_token.values())))} per token"  # on a CPU
    return f"{by_default}, {size(per_token[ROUNDED])} with --kv-dtype {ROUNDED}" if ROUNDED in per_token else by_default


def _fit_in_words(row: dict[str, Any], needed: str) -> str:
    if not row["fits"]:
        return f"no: {row['place']} has {size(row['free_bytes'])} free, and the weights are {needed}"
    return (
        f"yes: {size(row['free_bytes'])} free in {row['place']}, "
        f"room for about {row['conversations']:,} conversations of {row['context']:,} tokens after the weights"
    )
