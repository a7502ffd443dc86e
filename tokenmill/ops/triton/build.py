"""The table of ops of the Triton backend: the fastest kernels, or deterministic ones, whose order of summation does not
depend on the batch. Norms, activations, RoPE and routing work row by row in either case.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.ops.interface import Ops
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.ops.triton.adapters.ops import TritonLowRankOps
from tokenmill.ops.triton.attention.deterministic import deterministic_attention
from tokenmill.ops.triton.attention.latent import deterministic_latent_attend
from tokenmill.ops.triton.attention.plan import plan_attention
from tokenmill.ops.triton.attention.sparse import choose_entries, latent_attend
from tokenmill.ops.triton.attention.step import attention
from tokenmill.ops.triton.attention.windowed import deterministic_windowed_attend, windowed_attend
from tokenmill.ops.triton.elementwise.activation import act_mul, cut_act_mul, gate_rows
from tokenmill.ops.triton.elementwise.altup import ALTUP
from tokenmill.ops.triton.elementwise.gather import embed, gather_rows
from tokenmill.ops.triton.elementwise.hyper import HYPER
from tokenmill.ops.triton.elementwise.norm import add_rms_norm, rms_norm
from tokenmill.ops.triton.elementwise.short_conv import plan_short_conv, short_conv
from tokenmill.ops.triton.gemm.deterministic import deterministic_linear
from tokenmill.ops.triton.gemm.groups import deterministic_multiply_groups, multiply_groups
from tokenmill.ops.triton.gemm.linear import PackLinear, linear
from tokenmill.ops.triton.moe.grouped_gemm import deterministic_experts, experts
from tokenmill.ops.triton.moe.topk import route
from tokenmill.ops.triton.recurrent.mixer import deterministic_recurrent, recurrent
from tokenmill.ops.triton.recurrent.plan import plan_recurrent, plan_token_by_token
from tokenmill.ops.triton.regions import (
    adapted_regions,
    choose_deterministic,
    choose_regions,
    deterministic_adapted_regions,
    row_borders,
)
from tokenmill.ops.triton.sampling.argmax import argmax


def build_ops(quantization: str = "none", *, deterministic: bool = False) -> Ops:
    """Return the table of ops; `rotate` alone is torch's."""
    pack = PackLinear(quantization, keeps_blocks=not deterministic)
    fastest = replace(
        REFERENCE_OPS,
        name="triton",
        plan_attention=plan_attention,
        gather_rows=gather_rows,
        pack_linear=pack,
        pack_embedding=pack.embedding,
        pack_experts=pack.experts,
        joins_shared=True,
        embed=embed,
        linear=linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        attention=attention,
        latent_attend=latent_attend,
        choose_entries=choose_entries,
        windowed_attend=windowed_attend,
        multiply_groups=multiply_groups,
        plan_short_conv=plan_short_conv,
        short_conv=short_conv,
        plan_recurrent=plan_recurrent,
        recurrent=recurrent,
        act_mul=act_mul,
        cut_act_mul=cut_act_mul,
        gate_rows=gate_rows,
        route=route,
        experts=experts,
        altup=ALTUP,
        hyper=HYPER,
        argmax=argmax,
        choose_regions=choose_regions,
        adapted_regions=adapted_regions,
        low_rank=TritonLowRankOps(),
        row_borders=row_borders,
    )
    if not deterministic:
        return fastest
    return replace(
        fastest,
        linear=deterministic_linear,
        attention=deterministic_attention,
        latent_attend=deterministic_latent_attend,
        windowed_attend=deterministic_windowed_attend,
        multiply_groups=deterministic_multiply_groups,
        plan_recurrent=plan_token_by_token,
        recurrent=deterministic_recurrent,
        experts=deterministic_experts,
        choose_regions=choose_deterministic,
        adapted_regions=deterministic_adapted_regions,
        low_rank=TritonLowRankOps(deterministic=True),
    )
