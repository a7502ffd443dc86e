"""The flags that verbs share: bounded numbers, checks, and groups of flags.

A group is a config dataclass: its fields are the flags, their docstrings the help. Two dataclasses may share a field
name (`seed` of the weights, `seed` of an answer): `RENAMED` keeps the flags apart. A verb has flags for what acts
there: a setting that only several clients, or several sequences, would notice is not offered elsewhere. An option that
would do nothing, and a result that could not be written, are refused before anything runs.
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
MOST = 10**9  # seconds, tokens, requests: more than anyone needs, and small enough not to overflow later

Count = Annotated[int, Parameter(validator=Number(gte=1, lte=MOST))]
CountOrZero = Annotated[int, Parameter(validator=Number(gte=0, lte=MOST))]
Amount = Annotated[float, Parameter(validator=Number(gt=0, lte=MOST))]
AmountOrZero = Annotated[float, Parameter(validator=Number(gte=0, lte=MOST))]
Switch = Annotated[bool, Parameter(negative="")]
Share = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]


def whole_numbers_only(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 1.5 where an integer is wanted; left to itself the parser would round it."""
    for argument in arguments:
        if argument.hint in (int, int | None, tuple[int, ...]):
            for token in argument.tokens:
                if FRACTION.fullmatch(token.value):
                    raise InvalidConfig(f"{argument.name} takes an integer, not {token.value}")


Needs = dict[str, tuple[bool, str]]  # field → (whether it has an effect, what it needs for one)


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────


def refuse_idle(settings: Any, needs: Needs) -> None:
    """Refuse an option that would do nothing, before anything is sent."""
    for option in fields(settings):
        acts, wanted = needs.get(option.name, (True, ""))
        if not acts and getattr(settings, option.name) != option.default:
            raise InvalidConfig(f"--{option.name.replace('_', '-')} needs {wanted}", param=option.name)


def require_folder(file: Path | None, option: str) -> None:
    """Refuse a file that could not be written, before the run whose results it is for."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        why = "it is a folder" if file.is_dir() else "there is no such folder"
        raise InvalidConfig(f"--{option} {file} is no file that can be written: {why}", param=option)


def require_page(file: Path | None) -> None:
    """Refuse a page that could not be drawn or written, before what it is about."""
    if file is not None:
        from tokenmill.report.charts import require_charts

        require_folder(file, "html")
        require_charts()


RENAMED = {("model", "seed"): "weights-seed"}


# ── groups of flags ──────────────────────────────────────────────────────────────────────────────────


def flag_name(section: str, field: str) -> str:
    """The flag of a field, without its dashes."""
    return RENAMED.get((section, field), field.replace("_", "-"))


def _model_flag(field: str) -> str:
    return flag_name("model", field)


ModelFlags = Annotated[
    ModelConfig, Parameter(name="*", group="Model", name_transform=_model_flag, negative_iterable="")
]
CacheFlags = Annotated[CacheConfig, Parameter(name="*", group="KV cache")]
SchedulerFlags = Annotated[SchedulerConfig, Parameter(name="*", group="Scheduler")]
OpsFlags = Annotated[OpsConfig, Parameter(name="*", group="Where and how it runs")]
ParallelFlags = Annotated[ParallelConfig, Parameter(name="*", group="Several ranks")]
SamplingFlags = Annotated[SamplingConfig, Parameter(name="*", group="How answers are drawn", negative_iterable="")]
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
        """The engine's config; a MODEL among the arguments wins over `--model`. The command's processes are its own, so
        they start fast unless told otherwise."""
        model = replace(self.model, model=name) if name else self.model
        ops = replace(self.ops, fast_start=self.ops.fast_start is not False)
        return EngineConfig(model, self.cache, self.scheduler, ops, self.parallel)


def refuse_engine_flags(engine: EngineOptions) -> None:
    """Refuse flags of an engine where a server is asked, which has its own."""
    for group in fields(engine):
        settings = getattr(engine, group.name)
        for option in fields(settings):
            if getattr(settings, option.name) != option.default:
                flag = flag_name(group.name, option.name)
                why = "give the model's name alone" if flag == "model" else "the server that --url names has its own"
                raise InvalidConfig(f"--{flag} does nothing with --url: {why}", param=option.name)


FOR_CLIENTS = ("served_name", "max_waiting", "slo", "step_ms")


def _without(*fields: str) -> Parameter:
    """All flags but those of these fields."""
    return Parameter(name="*", parse=re.compile(rf"^(?!(?:{'|'.join(fields)})$)"))


ServerEngineFlags = Annotated[EngineOptions, Parameter(name="*")]
EngineFlags = Annotated[EngineOptions, _without(*FOR_CLIENTS)]
ChatEngineFlags = Annotated[EngineOptions, _without(*FOR_CLIENTS, "context_shift")]  # chat has its own default
ENGINE = EngineOptions()

MODEL_HELP = "Short name, GGUF file, model directory, Hugging Face id or scripted:FILE; the default model without it."
ModelName = Annotated[str | None, Parameter(help=MODEL_HELP)]
