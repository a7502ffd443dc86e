"""Chooses once, at load, who computes a model, and remembers why the others were refused.

`BACKENDS` is in order of preference; the torch reference is last and handles everything a ModelSpec can say.
"""

from __future__ import annotations

from tokenmill.errors import InvalidConfig
from tokenmill.ops.interface import Backend, Ops, OpsWanted
from tokenmill.ops.reference import REFERENCE
from tokenmill.ops.triton import TRITON

BACKENDS: tuple[Backend, ...] = (TRITON, REFERENCE)


def choose_ops(wanted: OpsWanted) -> tuple[Ops, list[str]]:
    """The first backend that can do what is wanted, and a line for every one looked at."""
    candidates = [backend for backend in BACKENDS if wanted.backend in ("auto", backend.name)]
    reasons: list[str] = []
    for backend in candidates:
        refusal = backend.refuse(wanted)
        if refusal is None:
            reasons.append(f"ops: {backend.name} computes the model on {wanted.device}")
            return backend.build(wanted), reasons
        reasons.append(f"ops: {backend.name} refused: {refusal}")
    raise _nobody_can(wanted, reasons)


def _nobody_can(wanted: OpsWanted, reasons: list[str]) -> InvalidConfig:
    known = ", ".join(backend.name for backend in BACKENDS)
    detail = "; ".join(reasons) or f"this installation has {known}"
    return InvalidConfig(f"no ops for backend {wanted.backend!r}: {detail}", param="backend", hint="use backend auto")
