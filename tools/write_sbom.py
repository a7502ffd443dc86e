"""Write the software bill of materials of this environment: what the package needs and is installed, as CycloneDX.

    python tools/write_sbom.py sbom.cdx.json [EXTRA ...]

Follows the requirements of the installed package through all of theirs, so it lists what a deployment runs, with
versions, licences and package URLs, and nothing that merely lies beside it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT_PACKAGE = "tokenmill"


def sbom(extras: Sequence[str] = ()) -> dict[str, Any]:
    """The bill of materials, in a fixed order: the same environment gives the same file."""
    components = [component(one) for one in sorted(needed(extras), key=lambda one: canonical(one.name))]
    root = component(distribution(ROOT_PACKAGE))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**root, "type": "application"}},
        "components": components,
    }


def needed(extras: Sequence[str]) -> Iterator[Distribution]:
    """All distributions that the package needs here, each once."""
    seen: set[str] = set()
    waiting = [(ROOT_PACKAGE, frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        for text in requires(name) or ():
            requirement = Requirement(text)
            marker, key = requirement.marker, canonical(requirement.name)
            applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in (wanted or {""}))
            if not applies or key in seen:
                continue
            try:
                found = distribution(requirement.name)
            except PackageNotFoundError:
                continue
            seen.add(key)
            yield found
            waiting.append((requirement.name, frozenset(requirement.extras)))


def component(found: Distribution) -> dict[str, Any]:
    metadata = found.metadata
    licence = metadata.get("License-Expression") or metadata.get("License") or ""
    made: dict[str, Any] = {
        "type": "library",
        "name": canonical(found.name),
        "version": found.version,
        "purl": f"pkg:pypi/{canonical(found.name)}@{found.version}",
        "bom-ref": f"{canonical(found.name)}@{found.version}",
    }
    if licence and "\n" not in licence and len(licence) < 200:
        made["licenses"] = [{"license": {"name": licence}}]
    return made


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(sbom(sys.argv[2:]), indent=1) + "\n", encoding="utf-8")
