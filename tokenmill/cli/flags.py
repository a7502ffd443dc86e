"""Flags shared by commands: bounded numbers, checks, and groups of flags.

A group is a config dataclass: its fields are the flags, their docstrings the help. If two dataclasses have a field of
the same name (`seed` of the weights and of an answer), `RENAMED` has another flag name. A command only has the flags
that affect it; settings for several clients are left out elsewhere. Options without effect, and output files that could
not be written, are refused before anything runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, Parameter
from cyclopts.validators import Number

from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, ParallelConfig, SchedulerConfig
from tokenmill.config.sampling import SamplingConfig
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig

FRACTION = re.compile(r"[+-]?\d*\.\d*[1-9]\d*")
MAX_NUMBER = 10**9  # of seconds, tokens or requests; small enough not to overflow later

Count = Annotated[int, Parameter(validator=Number(gte=1, lte=MAX_NUMBER))]
CountOrZero = Annotated[int, Parameter(validator=Number(gte=0, lte=MAX_NUMBER))]
Amount = Annotated[float, Parameter(validator=Number(gt=0, lte=MAX_NUMBER))]
AmountOrZero = Annotated[float, Parameter(validator=Number(gte=0, lte=MAX_NUMBER))]
Switch = Annotated[bool, Parameter(negative="")]
Share = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]


def whole_numbers_only(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 1.5 for an integer, which the parser would round."""
    for argument in arguments:
        if argument.hint in (int, int | None, tuple[int, ...]):
            for token in argument.tokens:
                if FRACTION.fullmatch(token.value):
                    raise InvalidConfig(f"{argument.name} takes an integer, not {token.value}")


Needs = dict[str, tuple[bool, str]]  # field → (whether it has an effect, what it needs to have one)


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────


def refuse_idle(settings: Any, needs: Needs) -> None:
    """Refuse an option that would have no effect, before anything is sent."""
    for option in fields(settings):
        acts, wanted = needs.get(option.name, (True, ""))
        if not acts and getattr(settings, option.name) != option.default:
            raise InvalidConfig(f"--{option.name.replace('_', '-')} needs {wanted}", param=option.name)


def require_folder(file: Path | None, option: str) -> None:
    """Refuse an output file that could not be written, before the run."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        why = "it is a folder" if file.is_dir() else "its folder does not exist"
        raise InvalidConfig(f"--{option} {file} can't be written: {why}", param=option)


def require_page(file: Path | None) -> None:
    """Refuse a page that could not be drawn or written, before the run."""
    if file is not None:
        from tokenmill.report.charts import require_charts

        require_folder(file, "html")
        require_charts()


RENAMED = {("model", "seed"): "weights-seed"}


# ── groups of flags ──────────────────────────────────────────────────────────────────────────────────


def flag_name(section: str, field: str) -> str:
    """Return the flag of a field, without its dashes."""
    return RENAMED.get((section, field), field.replace("_", "-"))


def _model_flag(field: str) -> str:
    return flag_name("model", field)


ModelFlags = Annotated[
    ModelConfig, Parameter(name="*", group="Model", name_transform=_model_flag, negative_iterable="")
]
CacheFlags = Annotated[CacheConfig, Parameter(name="*", group="KV cache")]
SchedulerFlags = Annotated[SchedulerConfig, Parameter(name="*", group="Scheduler")]
OpsFlags = Annotated[OpsConfig, Parameter(name="*", group="Device and kernels")]
ParallelFlags = Annotated[ParallelConfig, Parameter(name="*", group="Parallelism")]
SamplingFlags = Annotated[SamplingConfig, Parameter(name="*", group="Sampling", negative_iterable="")]
ServerFlags = Annotated[ServerConfig, Parameter(name="*", group="Server", negative_iterable="")]

MODEL, CACHE, SCHEDULER, OPS = ModelConfig(), CacheConfig(), SchedulerConfig(), OpsConfig()
PARALLEL, SAMPLING, SERVER = ParallelConfig(), SamplingConfig(), ServerConfig()


@dataclass(frozen=True)
class EngineOptions:
    """All settings of an engine."""

    model: ModelFlags = MODEL
    cache: CacheFlags = CACHE
    scheduler: SchedulerFlags = SCHEDULER
    ops: OpsFlags = OPS
    parallel: ParallelFlags = PARALLEL

    def config(self, name: str | None) -> EngineConfig:
        """Return the engine's config. A MODEL argument overrides `--model`; `fast_start` is on by default, because the
        processes belong to the command."""
        model = replace(self.model, model=name) if name else self.model
        ops = replace(self.ops, fast_start=self.ops.fast_start is not False)
        return EngineConfig(model, self.cache, self.scheduler, ops, self.parallel)


def refuse_engine_flags(engine: EngineOptions) -> None:
    """Refuse engine flags together with --url, since the server has its own settings."""
    for group in fields(engine):
        settings = getattr(engine, group.name)
        for option in fields(settings):
            if getattr(settings, option.name) != option.default:
                flag = flag_name(group.name, option.name)
                why = "pass the model's name as the argument" if flag == "model" else "the server has its own settings"
                raise InvalidConfig(f"--{flag} has no effect with --url: {why}", param=option.name)


SERVER_ONLY = ("served_name", "max_waiting", "slo", "step_ms")


def _without(*fields: str) -> Parameter:
    """Return a parameter for all flags except those of `fields`."""
    return Parameter(name="*", parse=re.compile(rf"^(?!(?:{'|'.join(fields)})$)"))


ServerEngineFlags = Annotated[EngineOptions, Parameter(name="*")]
EngineFlags = Annotated[EngineOptions, _without(*SERVER_ONLY)]
ChatEngineFlags = Annotated[EngineOptions, _without(*SERVER_ONLY, "context_shift")]  # chat has its own default
ENGINE = EngineOptions()

MODEL_HELP = "Short name, GGUF file, model directory, Hugging Face id or scripted:FILE; by default the default model."
ModelName = Annotated[str | None, Parameter(help=MODEL_HELP)]
