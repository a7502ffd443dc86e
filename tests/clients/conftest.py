"""What tests of other makers' clients share: a proxy that must stay unused, and a home for each client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client_farm import Canary, listening_canary


@pytest.fixture
def canary() -> Iterator[Canary]:
    """A client that calls anyone but this machine fails its test."""
    with listening_canary() as listening:
        yield listening
        assert listening.callers == []
