"""The groups of flags that verbs share: a config dataclass each; its fields are the flags, their docstrings the help.

Two dataclasses may share a field name (`seed` of the weights, `seed` of an answer): `RENAMED` keeps the flags apart.
A verb has flags for what acts there: what only several clients, or several sequences, would notice is not elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

from cyclopts import Parameter

from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.config.sampling import SamplingConfig
from tokenmill.config.server import ServerConfig

RENAMED = {("model", "seed"): "weights-seed"}


def flag_name(section: str, field: str) -> str:
    """The flag of a field, without its dashes."""
    return RENAMED.get((section, field), field.replace("_", "-"))


def _model_flag(field: str) -> str:
    return flag_name("model", field)


ModelFlags = Annotated[ModelConfig, Parameter(name="*", group="Model", name_transform=_model_flag)]
CacheFlags = Annotated[CacheConfig, Parameter(name="*", group="KV cache")]
SchedulerFlags = Annotated[SchedulerConfig, Parameter(name="*", group="Scheduler")]
OpsFlags = Annotated[OpsConfig, Parameter(name="*", group="Where and how it runs")]
SamplingFlags = Annotated[SamplingConfig, Parameter(name="*", group="How answers are drawn", negative_iterable="")]
ServerFlags = Annotated[ServerConfig, Parameter(name="*", group="Server", negative_iterable="")]

MODEL, CACHE, SCHEDULER, OPS = ModelConfig(), CacheConfig(), SchedulerConfig(), OpsConfig()
SAMPLING, SERVER = SamplingConfig(), ServerConfig()


@dataclass(frozen=True)
class EngineOptions:
    """Everything an engine can be told."""

    model: ModelFlags = MODEL
    cache: CacheFlags = CACHE
    scheduler: SchedulerFlags = SCHEDULER
    ops: OpsFlags = OPS

    def config(self, name: str | None) -> EngineConfig:
        """The engine's config; a MODEL among the arguments wins over `--model`. The command's processes are its own, so
        they start fast unless told otherwise."""
        model = replace(self.model, model=name) if name else self.model
        ops = replace(self.ops, fast_start=self.ops.fast_start is not False)
        return EngineConfig(model, self.cache, self.scheduler, ops)


FOR_CLIENTS, FOR_BATCHES = ("served_name", "max_waiting"), ("policy",)


def _without(*fields: str) -> Parameter:
    """All flags but those of these fields."""
    return Parameter(name="*", parse=re.compile(rf"^(?!(?:{'|'.join(fields)})$)"))


ServerEngineFlags = Annotated[EngineOptions, Parameter(name="*")]
BatchEngineFlags = Annotated[EngineOptions, _without(*FOR_CLIENTS)]
EngineFlags = Annotated[EngineOptions, _without(*FOR_CLIENTS, *FOR_BATCHES)]
ENGINE = EngineOptions()

MODEL_HELP = "Short name, GGUF file, model directory or Hugging Face id; the default model without it."
ModelName = Annotated[str | None, Parameter(help=MODEL_HELP)]
