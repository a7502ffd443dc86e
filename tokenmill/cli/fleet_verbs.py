"""`tokenmill scale`, `drain` and `roll`: the replicas of a running server or cluster."""

from __future__ import annotations

import os
from typing import Any

from tokenmill.cli.flags import CountOrZero, Switch
from tokenmill.cli.remote import RemoteServer
from tokenmill.cli.server_verbs import DEFAULT_URL
from tokenmill.config.cluster import replica_range


def scale_replicas(replicas: str, /, *, url: str = DEFAULT_URL) -> int:
    """Change how many replicas a running cluster has. Requests of one that ends go on in others.

    Parameters
    ----------
    replicas
        One number, or as many of a range as the load needs: 1..4; 0..4 ends the last one too without requests.
    url
        Where the cluster's front is; its key is TOKENMILL_API_KEY.
    """
    least, most = replica_range(replicas)
    _change(url, "/replicas/scale", {"replicas": replicas})
    print(f"{least} replicas" if least == most else f"{least} to {most} replicas, as the load needs them")
    return 0


def drain_replica(replica: CountOrZero, /, *, undo: Switch = False, url: str = DEFAULT_URL) -> int:
    """Move the requests of a replica to others, and give it no more.

    Parameters
    ----------
    replica
        Its number, as GET /replicas shows it.
    undo
        Let it work again.
    url
        Where the server is; its key is TOKENMILL_API_KEY.
    """
    _change(url, "/replicas/drain", {"replica": replica, "is_drained": not undo})
    print(f"replica {replica} {'works again' if undo else 'is empty and gets no requests'}")
    return 0


def roll_replicas(*, url: str = DEFAULT_URL) -> int:
    """Start the replicas of a server anew, one after the other; no request fails.

    Parameters
    ----------
    url
        Where the server is; its key is TOKENMILL_API_KEY.
    """
    done = _change(url, "/replicas/restart", {})
    print(f"started anew: {', '.join(map(str, done.get('restarted', []))) or 'none'}")
    return 0


def _change(url: str, path: str, body: dict[str, object]) -> dict[str, Any]:
    return RemoteServer(url, os.environ.get("TOKENMILL_API_KEY")).change(path, body)
