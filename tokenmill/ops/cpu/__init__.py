"""Native CPU kernels: a whole model step in one call, on packed weights, over the paged cache.

`is_available` says whether this installation and processor have them, `instruction_set` which variant runs, and
`NativeDecoder` is the model. Everything numeric is in `csrc/`; here weights are named, packed and handed over.
"""

from __future__ import annotations

from tokenmill.ops.cpu.availability import instruction_set, instruction_sets, is_available
from tokenmill.ops.cpu.decoder import NativeDecoder, refusal
from tokenmill.ops.cpu.packing import PACKED_QUANTS

__all__ = ["PACKED_QUANTS", "NativeDecoder", "instruction_set", "instruction_sets", "is_available", "refusal"]
