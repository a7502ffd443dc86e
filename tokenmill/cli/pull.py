"""`tokenmill pull`: fetch models into the store, each once, resumed where an earlier pull broke off."""

from __future__ import annotations

from tokenmill.cli.screen import PullScreen, size
from tokenmill.errors import InvalidRequest
from tokenmill.store import DEFAULT_MODEL, LocalModel, Store, parse_name, pull


def command(*models: str) -> int:
    """Fetch models into the store; the default model without a name.

    Parameters
    ----------
    models
        Short names (`tokenmill list --catalog`) or Hugging Face ids: owner/name, owner/name:Q4_K_M.
    """
    store = Store()
    for name in models or (DEFAULT_MODEL,):
        model = parse_name(name)
        if isinstance(model, LocalModel):
            raise InvalidRequest(f"{name} is on this machine already", hint=f"tokenmill run {name}")
        with PullScreen() as screen:
            manifest = pull(model, store, screen)
        print(f"{manifest.name}  {size(manifest.size_bytes)}  from {manifest.source}")
    return 0
