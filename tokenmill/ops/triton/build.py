"""The table of ops, filled with what is fastest on a GPU; or, where it is asked for, with kernels that add up in one
order whatever the batch. Norms, activations, rotation and routing work row by row in either.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.ops.interface import Ops
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.activation import act_mul
from tokenmill.ops.triton.attention import attention, plan_attention
from tokenmill.ops.triton.best import pick_best
from tokenmill.ops.triton.chosen_experts import add_norm_experts
from tokenmill.ops.triton.experts import experts
from tokenmill.ops.triton.fresh_attention import place_and_attend
from tokenmill.ops.triton.invariant_attention import invariant_attention
from tokenmill.ops.triton.invariant_experts import invariant_experts
from tokenmill.ops.triton.invariant_linear import invariant_linear
from tokenmill.ops.triton.large_products import add_linear, gated_linear
from tokenmill.ops.triton.linear import PackLinear, linear
from tokenmill.ops.triton.lookups import embed, pick_rows
from tokenmill.ops.triton.norm import add_rms_norm, rms_norm
from tokenmill.ops.triton.place import place_qkv
from tokenmill.ops.triton.rounded_stream import IN_HALVES, STREAMS
from tokenmill.ops.triton.route import route


def build_ops(quantization: str = "none", *, deterministic: bool = False) -> Ops:
    """Rotation is torch's."""
    pack = PackLinear(quantization, keeps_blocks=not deterministic)
    fastest = replace(
        REFERENCE_OPS,
        name="triton",
        plan_attention=plan_attention,
        pick_rows=pick_rows,
        pack_linear=pack,
        pack_embedding=pack.embedding,
        pack_experts=pack.experts,
        embed=embed,
        linear=linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        place_qkv=place_qkv,
        place_and_attend=place_and_attend,
        stream=STREAMS.get(quantization, IN_HALVES),
        attention=attention,
        act_mul=act_mul,
        gated_linear=gated_linear,
        add_linear=add_linear,
        route=route,
        experts=experts,
        add_norm_experts=add_norm_experts,
        pick_best=pick_best,
    )
    if not deterministic:
        return fastest
    return replace(
        fastest,
        linear=invariant_linear,
        gated_linear=None,
        add_linear=None,
        place_and_attend=None,
        attention=invariant_attention,
        experts=invariant_experts,
        add_norm_experts=None,
    )
