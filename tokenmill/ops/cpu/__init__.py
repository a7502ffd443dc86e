"""Native CPU kernels: a whole model step in one call, on packed weights, over the paged cache.

`is_available` says whether this installation and processor have them, `instruction_set` which variant runs,
`unsupported_reason` which models they don't compute, and `decoder.NativeDecoder` is the model. Everything numeric is in
`csrc/`; here weights are named, packed and handed over. Importing this package does not import torch.
"""

from __future__ import annotations

from tokenmill.ops.cpu.availability import instruction_set, instruction_sets, is_available, unsupported_reason

__all__ = ["instruction_set", "instruction_sets", "is_available", "unsupported_reason"]
