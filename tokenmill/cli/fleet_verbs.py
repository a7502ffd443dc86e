"""`tokenmill scale`, `drain` and `roll`: the replicas of a running server or cluster."""

from __future__ import annotations

import os
from typing import Any

from tokenmill.cli.flags import CountOrZero, Switch
from tokenmill.cli.remote import RemoteServer
from tokenmill.cli.server_verbs import DEFAULT_URL
from tokenmill.config.cluster import replica_range


def scale_replicas(replicas: str, /, *, url: str = DEFAULT_URL) -> int:
    """Change the number of replicas of a running cluster. Requests of a stopped replica continue on others.

    Parameters
    ----------
    replicas
        A number, or a range to scale within according to load, such as 1..4; 0..4 stops the last replica when idle.
    url
        URL of the cluster; the API key is read from TOKENMILL_API_KEY.
    """
    least, most = replica_range(replicas)
    _change(url, "/replicas/scale", {"replicas": replicas})
    print(f"{least} replicas" if least == most else f"{least} to {most} replicas, according to load")
    return 0


def drain_replica(replica: CountOrZero, /, *, undo: Switch = False, url: str = DEFAULT_URL) -> int:
    """Move a replica's requests to others, and assign it no new ones.

    Parameters
    ----------
    replica
        Number of the replica in GET /replicas.
    undo
        Put the replica back into service.
    url
        URL of the server; the API key is read from TOKENMILL_API_KEY.
    """
    _change(url, "/replicas/drain", {"replica": replica, "is_drained": not undo})
    print(f"replica {replica} {'is in service again' if undo else 'is drained'}")
    return 0


def roll_replicas(*, url: str = DEFAULT_URL) -> int:
    """Restart the replicas of a server one by one; no request fails.

    Parameters
    ----------
    url
        URL of the server; the API key is read from TOKENMILL_API_KEY.
    """
    done = _change(url, "/replicas/restart", {})
    print(f"restarted: {', '.join(map(str, done.get('restarted', []))) or 'none'}")
    return 0


def _change(url: str, path: str, body: dict[str, object]) -> dict[str, Any]:
    return RemoteServer(url, os.environ.get("TOKENMILL_API_KEY")).change(path, body)
