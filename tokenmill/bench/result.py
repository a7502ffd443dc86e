"""The result file of a run: settings, figures, every request, and the command to repeat it."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import tokenmill
from tokenmill.bench.load import LoadRun
from tokenmill.bench.request_records import BenchRecord
from tokenmill.errors import InvalidConfig

FORMAT = 1
MAX_FILE_BYTES = 1 << 30


def result(run: LoadRun, settings: dict[str, Any], totals: dict[str, Any]) -> dict[str, Any]:
    assert run.lag is not None
    return {
        "benchmark": "serve",
        "format": FORMAT,
        "tokenmill": tokenmill.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "client": f"{platform.node()}, {platform.platform()}, Python {platform.python_version()}",
        "command": without_key(sys.argv[1:]),
        "settings": settings,
        "lag": vars(run.lag),
        **totals,
    }


def without_key(arguments: list[str]) -> list[str]:
    """Hide the API key in a command line."""
    hidden = [re.sub(r"^(--api-key=).*", r"\1…", argument) for argument in arguments]
    return ["…" if before == "--api-key" else argument for before, argument in zip(["", *hidden], hidden, strict=False)]


def write_result(path: Path, found: dict[str, Any], run: LoadRun) -> None:
    path.write_text(json.dumps({**found, "records": [record.as_dict() for record in run.records]}), encoding="utf-8")


def read_result(path: Path) -> tuple[dict[str, Any], list[BenchRecord]]:
    """Read a result file: the figures and the records."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidConfig(f"{path} is too large for a result")
        found = json.loads(path.read_bytes())
        records = [BenchRecord.from_dict(kept) for kept in found.pop("records")]
    except OSError as problem:
        raise InvalidConfig(f"{path} can't be read: {problem.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InvalidConfig(f"{path} is no result of `bench serve --output`: {problem}") from None
    return found, records
