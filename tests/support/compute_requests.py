"""A small model that the Triton backend supports."""

from __future__ import annotations

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.ops.compute_request import ComputeRequest

LAYER = LayerSpec(Gqa(4, 2, 64, 1.0, None), MlpSpec(8))


SPEC = ModelSpec("test", 16, 16, (LAYER,), 1e-5, 64, tied_head=True)


WANTED = ComputeRequest(SPEC, "cuda", "bfloat16", "bfloat16")
