"""Description of a GPU, read without opening a context; `nvidia.py` and `amd.py` find them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    architecture: str  # as compilers call it: sm_90, gfx942
    vendor: Literal["nvidia", "amd"] = "nvidia"


def visible_indices(setting: str | None, count: int) -> list[int]:
    """Return the visible devices as CUDA and HIP do: indices up to the first that does not exist.

    UUIDs can't be resolved here and hide nothing.
    """
    if setting is None:
        return list(range(count))
    chosen: list[int] = []
    for part in filter(None, (part.strip() for part in setting.split(","))):
        if part.startswith(("GPU-", "MIG-")):
            return list(range(count))
        if not part.isdigit() or int(part) >= count:
            break
        chosen.append(int(part))
    return chosen
