"""The torch reference: every op in plain torch, on any device. Other backends are tested against it."""

from __future__ import annotations

from tokenmill.ops.compose import adapted_regions, composed
from tokenmill.ops.interface import Ops
from tokenmill.ops.reference.attention import attention, plan_attention, write_kv
from tokenmill.ops.reference.block_index import choose_blocks
from tokenmill.ops.reference.compressed_attention import windowed_attend
from tokenmill.ops.reference.elementwise import (
    act_mul,
    activate,
    add_rms_norm,
    cut_act_mul,
    gate_rows,
    layer_norm,
    rms_norm,
    rotate,
    softcap,
)
from tokenmill.ops.reference.experts import experts, pack_experts, route
from tokenmill.ops.reference.latent_attention import choose_entries, latent_attend
from tokenmill.ops.reference.linear import (
    embed,
    gather_rows,
    linear,
    multiply_groups,
    pack_embedding,
    pack_linear,
)
from tokenmill.ops.reference.low_rank import ReferenceLowRankOps
from tokenmill.ops.reference.recurrent import plan_recurrent, recurrent
from tokenmill.ops.reference.selective_scan import convolve_values, scan
from tokenmill.ops.reference.short_conv import plan_short_conv, short_conv
from tokenmill.ops.reference.streams import ALTUP, HYPER

REFERENCE_OPS = Ops(
    name="reference",
    pack_linear=pack_linear,
    pack_embedding=pack_embedding,
    pack_experts=pack_experts,
    plan_attention=plan_attention,
    gather_rows=gather_rows,
    embed=embed,
    linear=linear,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    add_rms_norm=add_rms_norm,
    rotate=rotate,
    write_kv=write_kv,
    attention=attention,
    latent_attend=latent_attend,
    choose_entries=choose_entries,
    choose_blocks=choose_blocks,
    windowed_attend=windowed_attend,
    multiply_groups=multiply_groups,
    plan_short_conv=plan_short_conv,
    short_conv=short_conv,
    plan_recurrent=plan_recurrent,
    recurrent=recurrent,
    convolve_values=convolve_values,
    scan=scan,
    act_mul=act_mul,
    cut_act_mul=cut_act_mul,
    activate=activate,
    gate_rows=gate_rows,
    route=route,
    experts=experts,
    softcap=softcap,
    altup=ALTUP,
    hyper=HYPER,
    choose_regions=composed,
    adapted_regions=adapted_regions,
    low_rank=ReferenceLowRankOps(),
)
