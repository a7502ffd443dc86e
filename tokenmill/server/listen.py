"""The listening sockets of a server. This module imports little, so that a busy port is reported before the rest is
imported."""

from __future__ import annotations

import contextlib
import os
import socket
from errno import EADDRNOTAVAIL

from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig


def require_free_ports(config: ServerConfig) -> None:
    """Raise InvalidConfig if the server could not listen."""
    for listener in bind_all(config):
        listener.close()


def bind_all(config: ServerConfig) -> list[socket.socket]:
    """Open a listening socket for each port; if one fails, close all of them."""
    with contextlib.ExitStack() as undo:
        listeners = [undo.enter_context(bind(config.host, port)) for port in config.port]
        undo.pop_all()
        return listeners


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket; InvalidConfig for a busy port or an unknown address."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        # Connections inherit TCP_NODELAY from their listener; asyncio sets it only on sockets created with a protocol
        # number. Without it each reply waits up to 40 ms for the client's kernel to acknowledge the head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (socket.gaierror, UnicodeError):
        raise InvalidConfig(
            f"cannot listen on {host!r}: no such address", param="host", hint="use --host 127.0.0.1 for this machine"
        ) from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        hint = "--host must be an address of this machine" if error.errno == EADDRNOTAVAIL else "choose another --port"
        problem = InvalidConfig(f"cannot listen on {host}:{port}: {why}", hint=hint)
        problem.exit_code = 1  # the setting is valid, but the machine refuses it
        raise problem from None
