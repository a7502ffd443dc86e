"""`tokenmill serve`: download the models if necessary, with a progress bar, then start the HTTP server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tokenmill.cli import flags
from tokenmill.config.served_models import ServedModelConfig, served_models
from tokenmill.engine.startup.core_prestart import take_core
from tokenmill.store import ResolvedModel, is_scripted

if TYPE_CHECKING:
    from tokenmill.server.engine_source import PlanRequest
    from tokenmill.server.loader import ModelMemory
    from tokenmill.server.ui.model_lists import FitFinder

MODELS_HELP = (
    "Short names, GGUF files, model directories, Hugging Face ids or scripted:FILE; by default the default model. "
    "The first is loaded at start, the others when they are first requested."
)


def command(
    *models: Annotated[str, Parameter(help=MODELS_HELP)],
    server: flags.ServerFlags = flags.SERVER,
    engine: flags.ServerEngineFlags = flags.ENGINE,
    model_tables: Annotated[str, Parameter(show=False)] = "{}",
) -> int:
    """Serve models over HTTP: OpenAI clients work against http://127.0.0.1:8000/v1."""
    from tokenmill.server.listen import require_free_ports

    require_free_ports(server)  # before imports that take seconds
    from tokenmill.cli import session
    from tokenmill.server.run import require_servable, run_server

    base = engine.config(None)
    wanted = served_models(base, models, json.loads(model_tables), server)
    require_servable(server)
    found = [session.fetch(one.engine.model.model) for one in wanted]
    named = [named_as(one, files) for one, files in zip(wanted, found, strict=True)]
    first = named[0].engine

    def announce() -> list[str]:
        from tokenmill.planner.serving import serving_lines

        return serving_lines(first, found[0].path, found[0].name)

    def fits() -> FitFinder:
        from tokenmill.planner.fits import FitHere

        return FitHere(base)

    is_planned = len(named) == 1 and not is_scripted(first.model.model)
    return run_server(
        named,
        server,
        planned_memory,
        child=take_core(fast_start=bool(first.ops.fast_start)),
        announce=announce if is_planned else None,
        base=base,
        fits=fits,
    )


def named_as(model: ServedModelConfig, found: ResolvedModel) -> ServedModelConfig:
    """Return the model with the name for clients: the configured one, or the model's own."""
    return replace(model, name=model.name or model.engine.model.served_name or found.name)


def planned_memory(request: PlanRequest) -> ModelMemory:
    """Plan the memory of a model as one of several; a scripted model has no weights, only a process."""
    from tokenmill.hardware.memory import probe_memory
    from tokenmill.planner.memory import CPU_RUNTIME_BYTES
    from tokenmill.planner.serving import serving_memory
    from tokenmill.server.loader import ModelMemory

    config, path, name, available, num_models = request
    if is_scripted(config.model.model):
        there, taken = probe_memory().available_bytes, CPU_RUNTIME_BYTES
        problem = None if available is None or taken <= available else too_large(taken, available)
        return ModelMemory("cpu", there, taken, taken, problem=problem)
    device, memory = serving_memory(config, path, name, available=available, num_models=num_models)
    fits = memory.num_blocks > 1 and memory.total <= memory.available
    return ModelMemory(
        device,
        memory.available,
        memory.total - memory.kv_pool,
        memory.total,
        memory.num_blocks,
        memory.num_states or None,
        None if fits else too_large(memory.total, memory.available),
    )


def too_large(num_bytes: int, available: int) -> str:
    return f"it needs {num_bytes / 1e9:.2f} GB of memory, but only {max(0, available) / 1e9:.2f} GB are available"
