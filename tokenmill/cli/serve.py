"""`tokenmill serve`: the model over HTTP. Fetches it first, with a progress bar, then hands over to the server."""

from __future__ import annotations

from tokenmill.cli import flags, session
from tokenmill.engine.startup.core_prestart import take_core
from tokenmill.store import is_scripted


def command(
    model: flags.ModelName = None,
    /,
    *,
    server: flags.ServerFlags = flags.SERVER,
    engine: flags.ServerEngineFlags = flags.ENGINE,
) -> int:
    """Serve a model over HTTP: OpenAI clients work against http://127.0.0.1:8000/v1."""
    from tokenmill.server.run import require_servable, run_server

    config = engine.config(model)
    require_servable(server)
    found = session.fetch(config.model.model)

    def plan() -> list[str]:
        from tokenmill.planner.serving import serving_lines

        return serving_lines(config, found.path, found.name)

    core = take_core(fast_start=bool(config.ops.fast_start))
    return run_server(config, server, core, None if is_scripted(config.model.model) else plan)
