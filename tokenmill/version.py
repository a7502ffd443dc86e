"""Which Tokenmill this is, for rooms that may not import the package's front door."""

from __future__ import annotations

VERSION = "0.1.0"
