"""`tokenmill rm`: remove models from the store."""

from __future__ import annotations

from tokenmill.cli.screen import size
from tokenmill.errors import InvalidRequest
from tokenmill.store import LocalModel, Store, parse_name


def command(model: str, /, *more: str) -> int:
    """Remove models from the store. Content that another model uses stays.

    Parameters
    ----------
    model
        Name as `tokenmill list` shows it.
    more
        More of them.
    """
    from tokenmill.weights.packed_cache import prune

    store = Store()
    for name in (model, *more):
        named = parse_name(name)
        if isinstance(named, LocalModel):
            raise InvalidRequest(f"{name} is a path, not a model in the store", hint="delete the file yourself")
        freed = store.remove(named.name) + prune()  # what was packed from it goes with it
        print(f"removed {named.name}, {size(freed)} freed")
    return 0
