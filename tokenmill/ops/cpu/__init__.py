"""Native CPU kernels: a whole model step in one call, on packed weights, over the paged cache.

`is_available` returns whether this installation has them, `instruction_set` which variant runs, `unsupported_reason`
why a model is not supported; `decoder.NativeDecoder` is the model. All arithmetic is in `csrc/`; this package names the
weights, packs them and passes them on. Importing it does not import torch.
"""

from __future__ import annotations

from tokenmill.ops.cpu.availability import instruction_set, instruction_sets, is_available, unsupported_reason

__all__ = ["instruction_set", "instruction_sets", "is_available", "unsupported_reason"]
