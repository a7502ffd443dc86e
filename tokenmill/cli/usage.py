"""`tokenmill usage`: report the usage of a server from its ledger."""

from __future__ import annotations

import csv as csv_format
import sqlite3
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tokenmill.cli.output import print_table
from tokenmill.errors import InvalidConfig
from tokenmill.server.ledger import groups_of, moment_of, summed
from tokenmill.server.state.database import opened
from tokenmill.server.state.server_state import FILE_NAME
from tokenmill.store.layout import store_root

Flag = Annotated[bool, Parameter(negative="")]


def command(
    *, by: str = "key", since: str = "30d", csv: Flag = False, json: Flag = False, state_dir: Path | None = None
) -> int:
    """Report a server's usage: requests, prompt tokens (and how many were cached) and answer tokens.

    Parameters
    ----------
    by
        Group by key, user, model, outcome, day or month; several separated by commas.
    since
        Start: a date, or a time before now (12h, 7d, 8w).
    csv
        Print comma-separated values.
    json
        Print one JSON array.
    state_dir
        Folder of the server's state; by default `state` in TOKENMILL_HOME.
    """
    groups, since_s = groups_of(by), moment_of(since, time.time())
    path = (state_dir or store_root() / "state") / FILE_NAME
    if not path.exists():
        raise InvalidConfig(f"there is no ledger in {path.parent}", hint="a server with API keys writes one")
    try:
        connection = opened(path)
        rows = summed(connection, groups, since_s)
        connection.close()
    except sqlite3.Error as problem:
        raise InvalidConfig(f"{path} can't be read: {problem}") from None
    if json:
        print(msgspec.json.encode(rows).decode())
        return 0
    titles = tuple(rows[0]) if rows else (*groups, "requests")
    if csv:
        writer = csv_format.writer(sys.stdout, lineterminator="\n")
        writer.writerows([titles, *[row.values() for row in rows]])
    else:
        shown = [tuple(str(value) if value != "" else "-" for value in row.values()) for row in rows]
        print_table(tuple(title.upper().replace("_", " ") for title in titles), shown)
    return 0
