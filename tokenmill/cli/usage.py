"""`tokenmill usage`: what the requests of a server took, from its ledger."""

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
    """Add up what the requests of a server took: requests, tokens of prompts (cached ones among them) and of answers.

    Parameters
    ----------
    by
        Groups: key, user, model, outcome, day, month; several with commas.
    since
        A date, or a span from now: 12h, 7d, 8w.
    csv
        Comma-separated values.
    json
        One JSON array for programs.
    state_dir
        Where the server keeps its state; `state` in TOKENMILL_HOME by default.
    """
    groups, since_s = groups_of(by), moment_of(since, time.time())
    path = (state_dir or store_root() / "state") / FILE_NAME
    if not path.exists():
        raise InvalidConfig(f"there is no ledger in {path.parent}", hint="a server with API keys keeps one")
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
