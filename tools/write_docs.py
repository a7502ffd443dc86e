"""Write what is made from the code: pages of `docs/` with every flag and setting, every model and format, and the
types of settings that editors and type checkers read.

    python tools/write_docs.py

`docs/reference.md` comes from the command line's own parser, the settings' dataclasses, the error tree and the metric
series, the tool-call formats; `docs/models.md` from the model families, the planner's outlines, the catalog and the
backends' formats; `tokenmill/config/setting_types.py` from the settings' dataclasses. A test compares all of them with
what this program would write.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import gguf
from cyclopts import App

import tokenmill
from tokenmill import errors
from tokenmill.arch import families, outlines
from tokenmill.arch.family import Family
from tokenmill.arch.gguf_file import GGML_TYPES, GGMLType
from tokenmill.arch.packed_formats import StoredFormat, packed_int_format
from tokenmill.arch.text_parts import MULTIMODAL
from tokenmill.cli import VERBS
from tokenmill.cli.dispatch import SECTIONS, build_app
from tokenmill.cli.flags import flag_name
from tokenmill.config.by_name import PARTS
from tokenmill.config.other_names import DETERMINED_BY_FILES, OTHER_NAMES, OUR_VALUES, OtherName
from tokenmill.observe import metrics
from tokenmill.ops.cpu.packing import PACKED_QUANTS
from tokenmill.store.catalog import load_catalog
from tokenmill.text.speech.formats import CALL_FORMATS
from tokenmill.types import ToolCall

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(tokenmill.__file__).parent
MADE = "Made by `python tools/write_docs.py`; a test compares."

# Variables that are no setting. A test finds those that the code reads and this table does not have.
ENVIRONMENT = {
    "TOKENMILL_CLUSTER_KEY": "the key of a cluster for `tokenmill host`, where no --key-file is given",
    "TOKENMILL_CONFIG": "path of a TOML file of settings, as `--config`",
    "TOKENMILL_DEBUG": "`1` shows the traceback behind a one-line error",
    "TOKENMILL_UNPROVEN_KERNELS": "`1`, or names: chooses GPU kernels that no GPU has run yet "
    "(`tokenmill doctor --kernels MODEL` lists them)",
    "TOKENMILL_RANK_KEY": "the key of a pipeline whose stages are on several machines (`--stages-at`)",
    "TOKENMILL_HOME": "where models are kept; `~/.cache/tokenmill` by default",
    "OPENAI_API_KEY": "the API key that `--url` sends, where TOKENMILL_API_KEY is not set",
    "SHELL": "the shell that `tokenmill completion` writes for, where none is named",
    "NO_COLOR": "anything but empty: no colours in a terminal",
    "TERM": "`dumb`: no colours in a terminal",
    "NOTIFY_SOCKET": "where systemd wants to be told that a server is ready (`Type=notify`)",
    "WATCHDOG_USEC": "how often systemd wants a sign of life (`WatchdogSec`)",
    "OTEL_SERVICE_NAME": "the name in traces, `tokenmill` by default; the library reads further `OTEL_…` variables",
    "HF_ENDPOINT": "another address of the Hugging Face hub, as in `huggingface_hub`",
    "CUDA_VISIBLE_DEVICES": "which NVIDIA GPUs are seen",
    "ROCR_VISIBLE_DEVICES": "which AMD GPUs are seen",
    "HIP_VISIBLE_DEVICES": "which AMD GPUs are seen, among those that ROCR_VISIBLE_DEVICES leaves",
}

# Models that only the planner knows, by the `model_type` of their configs.
PLANNED = {
    "kimi_k3": "Kimi K3: recurrent layers with a decay per channel, gated latent attention, experts in a latent",
    "nemotron-nas": "Llama-Nemotron Super 49B: layers that differ in their sizes, or lack attention",
    "phi-msft": "Phi-1.5, Phi-2",
}


# ── docs/reference.md ──────────────────────────────────────────────────────────────────────────────────


SETTINGS_HEAD = """## Settings

A setting is a flag, an environment variable, a key in a TOML file and, for the engine's, a keyword of `LLM` and
`AsyncEngine.start`: `--max-context 4096` is `TOKENMILL_MAX_CONTEXT=4096`, is `max_context = 4096` under `[model]`, is
`LLM(…, max_context=4096)`. Flags win over the environment, which wins over the file. What they are for:
[configuration.md](configuration.md); parameters of one generation over HTTP and in Python:
[SAMPLING.md](SAMPLING.md)."""
COMMANDS_HEAD = """## Commands

Arguments of each command that are no settings; the settings it also takes are named by their sections."""
ERRORS_HEAD = """## Errors

Answers over HTTP carry `code`; the command line prints one line and ends with the exit code."""
METRICS_HEAD = """## Metrics

`GET /metrics`, Prometheus text format; every name begins with `tokenmill_`."""


def reference() -> str:
    flags = {verb: list(verb_arguments(app)) for verb, app in command_apps()}
    variables = [[f"`{name}`", what] for name, what in ENVIRONMENT.items()]
    parts = [
        "# Reference: settings, flags, environment, errors, metrics",
        MADE,
        SETTINGS_HEAD,
        *[settings_table(section, flags) for section in SECTIONS],
        COMMANDS_HEAD,
        *[command_section(verb, app, flags[verb]) for verb, app in command_apps()],
        "## Other environment variables",
        table(["variable", "what"], variables),
        ERRORS_HEAD,
        table(["code", "HTTP", "exit", "class"], error_rows()),
        METRICS_HEAD,
        metric_table(),
        TOOL_FORMATS_HEAD,
        table(["`--tool-format`", "one call"], call_format_rows()),
    ]
    return "\n\n".join(parts) + "\n"


def call_format_rows() -> Iterator[list[str]]:
    call = ToolCall(id="abcd12345", name="weather", arguments='{"city": "Paris"}')
    for row in CALL_FORMATS:
        written = row.write([call]).replace("\n", "⏎").replace("|", "\\|")
        yield [f"`{row.name}`", f"`` {written} ``"]


TOOL_FORMATS_HEAD = """## Tool-call formats

How families write calls; which one a model has is found out from its chat template ([tools.md](tools.md)). ⏎ is a line
break."""


def command_apps() -> Iterator[tuple[str, App]]:
    """Every command with its parser: `serve`, `bench offline`, …"""
    for verb in VERBS:
        app = build_app(verb, None)[verb]
        names = [name for name in app if not name.startswith("-")]
        if names:
            yield from ((f"{verb} {name}", app[name]) for name in names)
        else:
            yield verb, app


def verb_arguments(app: App) -> Iterator[Any]:
    for argument in app.assemble_argument_collection(parse_docstring=True):
        if argument.parse and argument.show and argument.names[0] != "*":
            yield argument


def setting_names(section: str) -> list[str]:
    return [field.name for field in fields(SECTIONS[section])]


def settings_table(section: str, flags: dict[str, list[Any]]) -> str:
    """One row for each field of a section's dataclass, as the first command that has its flag describes it."""
    rows, commands = [], []
    for name in setting_names(section):
        flag = f"--{flag_name(section, name)}"
        found = {
            verb: argument
            for verb, arguments in flags.items()
            for argument in arguments
            if flag in argument.names and belongs_to(argument, section)
        }
        assert found, f"no command has a flag for {section}.{name}"
        one = next(iter(found.values()))
        commands.append(", ".join(f"`{verb}`" for verb in found))
        rows.append([f"`{flag}`", kind(one.hint), default(one), help_of(one)])
    usual = max(commands, key=commands.count)
    for row, verbs in zip(rows, commands, strict=True):
        row[3] += "" if verbs == usual else f" Only in {verbs}."
    return f"### `[{section}]`\n\nFlags of {usual}.\n\n" + table(["flag", "value", "default", "what"], rows)


def belongs_to(argument: Any, section: str) -> bool:
    return any(group.name == GROUPS[section] for group in argument.parameter.group)


GROUPS = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "ops": "Device and kernels",
    "parallel": "Parallelism",
    "sampling": "Sampling",
    "server": "Server",
}


def command_section(verb: str, app: App, arguments: list[Any]) -> str:
    own = [one for one in arguments if not any(belongs_to(one, section) for section in GROUPS)]
    sections = [f"`[{name}]`" for name in GROUPS if any(belongs_to(one, name) for one in arguments)]
    lines = [f"### `tokenmill {verb}`", first_sentence(app.help)]
    if sections:
        lines.append(f"Settings: {', '.join(sections)}.")
    if own:
        rows = [[spelled(one), kind(one.hint), default(one), help_of(one)] for one in own]
        lines.append(table(["argument", "value", "default", "what"], rows))
    return "\n\n".join(lines)


def spelled(argument: Any) -> str:
    return f"`{argument.names[0]}`"


def kind(hint: Any) -> str:
    """What a value looks like, in words."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(kind(one) for one in get_args(hint) if one is not NoneType)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) in (tuple, list):
        return f"{kind(get_args(hint)[0])}, several"
    words = {int: "integer", float: "number", bool: "on/off", str: "text", Path: "path"}
    return words.get(hint, getattr(hint, "__name__", str(hint)).lower())


def default(argument: Any) -> str:
    value = argument.field_info.default
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value == sys.executable:
        return "this Python"
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return "–" if value in (None, "") else f"`{value}`"


def help_of(argument: Any) -> str:
    return " ".join((argument.parameter.help or "").split()).replace("|", "\\|")


def first_sentence(text: str) -> str:
    return " ".join(re.split(r"\n\s*\n", text.strip())[0].split())


def error_rows() -> list[list[str]]:
    found = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.TokenmillError)]
    ordered = sorted(found, key=lambda one: (one.http_status, one.code, one.__name__))
    return [[f"`{one.code}`", str(one.http_status), str(one.exit_code), f"`{one.__name__}`"] for one in ordered]


def metric_table() -> str:
    """The table at the top of `observe/metrics.py`."""
    lines = [line for line in (metrics.__doc__ or "").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return table(["series", "kind", "what"], [[f"`{row[0]}`", *row[1:]] for row in rows[2:]])


def environment_names() -> set[str]:
    """Variables that the package reads by name: `os.environ.get("NAME")` and the like."""
    pattern = re.compile(r"environ(?:ment)?(?:\.get\(|\[)\s*\"([A-Z][A-Z0-9_]+)\"")
    return {name for path in PACKAGE.rglob("*.py") for name in pattern.findall(path.read_text(encoding="utf-8"))}


# ── docs/models.md ─────────────────────────────────────────────────────────────────────────────────────


FAMILIES_HEAD = """## Families that run

From safetensors directories (`model_type` in config.json) and from GGUF files (`general.architecture`), on CPUs and
GPUs. A variant that is not implemented is refused by name when the model is loaded; nothing is guessed.

Only on CPUs: OLMo Hybrid, Ling and Ring 3, Jamba, Mamba-1, Mamba-2 and Falcon Mamba, and models of recurrent layers
with more than 16 query heads per KV head (Nemotron 3 Ultra). On GPUs, BLOOM, MPT, MiMo-V2-Flash, MiniMax-M3 and Step
models with limited activations use torch's own operations, which are slow. `tokenmill show config.json` says what
computes a given model."""
NAMES_HEAD = """## Short names

`tokenmill pull NAME`, or any command that takes a MODEL. Any other model: the path of a GGUF file, a model directory,
or a Hugging Face id."""
TEXT_PARTS_HEAD = """## Text parts of multimodal models

The engine reads the text part of these checkpoints, if `text_config` has the `model_type` of a family above; parts that
see or hear stay in the file, and images and audio in requests are refused. Families whose `model_type` is that of a
multimodal model (`gemma3`, `llama4`, `qwen3_vl` …) are read in the same way."""

PLANNED_HEAD = """## Models that can only be planned for

`tokenmill plan` reads their `config.json` and computes the memory they need; the engine does not run them."""
_INTEGERS, _KEPT4, _KEPT8 = "computed as integers", "stored in 4 bits with scales", "stored in 8 bits with scales"
_ORDERED = "stored in 4 or 8 bits, inputs reordered like the columns"
_TABLE = "stored unchanged, as 4-bit indices into a table (Hopper)"
_IN_4_BITS = "stored unchanged, as 4-bit floats"
OTHER_FORMATS = [
    [
        "safetensors: fp8 (e4m3; blocks, rows or whole matrices)",
        "8",
        "computed as floats",
        "computed as floats, also with blocks of 128 columns and in experts (from compute capability 8.9 on; "
        "activations of more than 32 rows are rounded to fp8 too)",
    ],
    ["compressed-tensors W4A16 (pack-quantized, to 4 bits)", "4", _INTEGERS, _KEPT4],
    ["compressed-tensors W8A16 and W8A8 (pack-, int-, naive-quantized)", "8", _INTEGERS, _KEPT8],
    ["compressed-tensors fp8 and mxfp8 (float-, naive-quantized)", "8", "computed as floats", "as fp8 above"],
    ["compressed-tensors and ModelOpt NVFP4", "4.5", _INTEGERS, _IN_4_BITS],
    ["ModelOpt FP8; mixtures of FP8 and NVFP4", "8", "each as above", "each as above"],
    ["GPTQ, 2, 3 and 4 bits; AWQ, 4 bits", "4", _INTEGERS, _KEPT4],
    ["GPTQ and AWQ, 8 bits", "8", _INTEGERS, _KEPT8],
    ["GPTQ and compressed-tensors with act order", "4, 8", _ORDERED, _ORDERED],
    ["bitsandbytes nf4, fp4", "4.5", "integers, tables of 16-bit values", _TABLE],
    ["bitsandbytes int8", "8", _INTEGERS, _KEPT8],
    ["HQQ along the columns (axis 1), to 4 bits", "5", _INTEGERS, _KEPT4],
    ["HQQ along the columns, 8 bits", "9", _INTEGERS, _KEPT8],
    ["HQQ along the rows (axis 0)", "16", "dequantized to 16 bits", "dequantized"],
    ["MXFP4 (gpt-oss, compressed-tensors)", "4.25", _INTEGERS, _IN_4_BITS],
]
FORMATS_FOOT = """One checkpoint may mix formats: the format of each matrix is recognised by its tensors. Activations
are not quantised in the way that W8A8 and FP8 checkpoints define; weights keep every bit of the file, and their values
equal those of the quantiser's own dequantization.

Formats that a backend can't compute with directly are dequantized when they are loaded: to float16 by
the native CPU kernels, to the compute dtype on a GPU. On a GPU, `--dtype float32` and `--deterministic` dequantize
all formats, and on GPUs other than Hopper nf4 and fp4 are dequantized too. `--quantization` quantises unquantised
weights while they load ([configuration.md](configuration.md))."""


def models() -> str:
    names = [[f"`{entry.name}`", entry.about, entry.license] for entry in load_catalog().values()]
    parts = [
        "# Models and weight formats",
        MADE,
        FAMILIES_HEAD,
        table(["models", "`model_type`", "GGUF", "traits"], family_rows()),
        NAMES_HEAD,
        table(["name", "about", "licence"], names),
        TEXT_PARTS_HEAD,
        table(["`model_type`", "text part, if the file does not say"], text_part_rows()),
        PLANNED_HEAD,
        table(["models", "`model_type`"], outline_rows()),
        "## Weight formats",
        table(["format", "bits a weight", "native CPU kernels", "GPU kernels"], format_rows()),
        FORMATS_FOOT,
    ]
    return "\n\n".join(parts) + "\n"


def about(family: Family) -> str:
    """The first sentence of the file that defines a family."""
    constant = next(name for name, value in vars(families).items() if value is family)
    is_defined = re.compile(rf"^{constant}\b.* = ", re.MULTILINE).search
    path = next(path for path in FAMILIES.glob("*.py") if is_defined(path.read_text(encoding="utf-8")))
    module = importlib.import_module(f"{families.__name__}.{path.stem}")
    return re.split(r"\.\s|;\s", " ".join((module.__doc__ or "").split()))[0].rstrip(" .,")


def family_rows() -> Iterator[list[str]]:
    """Yield a row for each file of families, in alphabetical order of the models."""
    by_file: dict[str, list[Family]] = {}
    for family in families.ALL:
        by_file.setdefault(about(family), []).append(family)
    for what, members in sorted(by_file.items(), key=lambda item: item[0].casefold()):
        types = [f"`{name}`" for family in members for name in family.model_types]
        in_gguf = [f"`{family.gguf.arch}`" for family in members if family.gguf is not None]
        found = [trait for family in members for trait in traits(family)]
        yield [what, *(", ".join(dict.fromkeys(names)) or "–" for names in (types, in_gguf)), _joined(found)]


def _joined(found: list[str]) -> str:
    return "; ".join(dict.fromkeys(found)) or "–"


def traits(family: Family) -> Iterable[str]:
    """Yield what distinguishes a family from a plain decoder, by the fields that differ from the defaults."""
    words = {
        "qkv_bias": "bias in q, k, v",
        "qk_norm": "q and k norms",
        "norms": "norms after attention and MLP",
        "has_softcaps": "soft caps, if configured",
        "has_local_rope": "separate rope for windowed layers",
        "has_partial_rotary": "rope over part of a head",
        "windows": "sliding windows, if configured",
        "experts": "routed experts",
    }
    plain = {field.name: field.default for field in fields(Family)}
    values = {name: getattr(family, name) for name in words}
    kinds = ("qk_norm", "norms")  # strings, not flags
    return [
        words[name]
        for name, value in values.items()
        if value is True or ((callable(value) or name in kinds) and value != plain[name])
    ]


def text_part_rows() -> Iterator[list[str]]:
    by_text: dict[str, list[str]] = {}
    for model_type, text in MULTIMODAL.items():
        by_text.setdefault(text, []).append(f"`{model_type}`")
    for text, types in by_text.items():
        yield [", ".join(types), f"`{text}`"]


def outline_rows() -> Iterator[list[str]]:
    planned = [name for name in outlines.LAYERS if name not in families.BY_MODEL_TYPE]
    by_words: dict[str, list[str]] = {}
    for model_type in planned:
        by_words.setdefault(PLANNED[model_type], []).append(f"`{model_type}`")
    for words, types in by_words.items():
        yield [words, ", ".join(types)]


def format_rows() -> list[list[str]]:
    rows = [
        ["safetensors: float32, float16, bfloat16", "32, 16", "stored unchanged", "computed in 16 or 32 bits"],
        *OTHER_FORMATS,
    ]
    for kind_ in GGML_TYPES.values():
        if kind_.block_size > 1 and can_expand(kind_):
            packed = packed_int_format("layers.0.q.weight", (4096, 4096), StoredFormat(kind_.name))
            bits = f"{kind_.block_bytes * 8 / kind_.block_size:.4g}"
            on_cpu = _INTEGERS if kind_.name in PACKED_QUANTS else "dequantized"
            on_gpu = "dequantized" if packed is None else f"stored in {packed.bits} bits with scales"
            on_gpu = _IN_4_BITS if packed is not None and packed.is_fp4 else on_gpu
            if packed is not None and packed.table:
                wide = packed_int_format("layers.0.q.weight", (4096, 4096), StoredFormat(kind_.name, is_widened=True))
                experts = "dequantized" if wide is None else f"in {wide.bits} bits with scales"
                on_gpu = f"{_TABLE}; experts, and on other GPUs, {experts}"
            rows.append([f"GGUF {kind_.name}", bits, on_cpu, on_gpu])
    return rows


def can_expand(kind_: GGMLType) -> bool:
    import numpy as np

    try:
        gguf.quants.dequantize(np.zeros((1, kind_.block_bytes), np.uint8), gguf.GGMLQuantizationType[kind_.name])
    except (KeyError, NotImplementedError):
        return False
    return True


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ── types of settings ────────────────────────────────────────────────────────────────────────────────

TYPES_HEAD = '''"""Types of settings that `LLM` and `AsyncEngine.start` take as keywords, for editors and type checkers.

Made by `python tools/write_docs.py` from the dataclasses in `config/engine.py`, which explain each; a test compares.
Names of other engines that mean the same (`config/other_names.py`) come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict


class EngineSettings(TypedDict, total=False):
'''


def setting_types() -> str:
    lines = [
        f"    {name}: {annotation(with_other_spellings(name, hint))}"
        for name, hint in sorted(engine_settings().items())
        if name != "model"
    ]
    others = [f"    {name}: Any" for name, other in sorted(OTHER_NAMES.items()) if is_engine_name(other)]
    return "\n".join([TYPES_HEAD.rstrip(), *lines, "    adapters: Mapping[str, str | Path]", *others, ""])


def engine_settings() -> dict[str, Any]:
    return {name: hint for part in PARTS.values() for name, hint in get_type_hints(part).items()}


def with_other_spellings(name: str, hint: Any) -> Any:
    """The type of a setting, and the values that other engines write for the same."""
    if name in DETERMINED_BY_FILES:
        return str | None
    return Literal[(*get_args(hint), *OUR_VALUES[name])] if name in OUR_VALUES else hint


def is_engine_name(other: OtherName) -> bool:
    """Return whether `LLM(...)` takes this name of another engine, with some value or in vain with a known one."""
    known = engine_settings()
    return other.whose == "vLLM" and (other.ours in known if other.ours else bool(other.no_effect))


def annotation(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(annotation(one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(json.dumps(value) for value in get_args(hint))}]"
    if get_origin(hint) is tuple:
        return f"tuple[{annotation(get_args(hint)[0])}, ...]"
    return "None" if hint is NoneType else str(hint.__name__)


FAMILIES = ROOT / "tokenmill" / "arch" / "families"
PAGES = {
    "docs/reference.md": reference,
    "docs/models.md": models,
    "tokenmill/config/setting_types.py": setting_types,
}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (ROOT / name).write_text(made(), encoding="utf-8")
        print(ROOT / name)
