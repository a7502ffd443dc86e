"""The version, for modules that may not import the package itself."""

from __future__ import annotations

VERSION = "0.1.0"
