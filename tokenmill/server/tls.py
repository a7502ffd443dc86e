"""The TLS certificate and key of a server, checked before they are used."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig


@dataclass(frozen=True)
class TlsFiles:
    cert: Path
    key: Path

    def require_usable(self) -> None:
        """Refuse files that can't be read or do not match. This uses a new SSL context: a failure in the context in
        use would leave it with a certificate and another one's key."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
            why = getattr(problem, "reason", None) or getattr(problem, "strerror", None) or problem
            raise InvalidConfig(f"{self.cert} and {self.key} are not a certificate and its key: {why}") from None


def tls_files(config: ServerConfig) -> TlsFiles | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return TlsFiles(config.tls_cert, config.tls_key)


def _no_password() -> str:
    raise ValueError("the key is encrypted")
