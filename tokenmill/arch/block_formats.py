"""Block formats: the byte layouts in which rows of quantised matrices are passed from files to kernels.

GGUF's formats keep their names and layouts (`gguf_file.py`). Other quantisers use scales that no GGUF format can store
without rounding, so their matrices get formats of our own, with blocks of 32 columns. Nibbles are ordered as in GGUF's
Q4_0, the first half of the block in the low nibbles:

    G4    d[4] z[4] q[16]         d * (q - z)                 GPTQ, AWQ, compressed-tensors, HQQ: integers of 4 bits
    G8    d[4] z[4] q[32]         d * (q - z), q unsigned     the same with 8 bits
    B8    d[4] q[32]              d * q / 127                 bitsandbytes' int8
    F8    d[4] q[32]              d * q, q in e4m3            fp8 checkpoints of all kinds
    NF4   d[4] q[16]              d * table[q]                bitsandbytes' nf4
    FP4   d[4] q[16]              d * table[q]                bitsandbytes' fp4
    NV4   g[4] s[2] q[16]         s * g * q, q in e2m1        ModelOpt's NVFP4: s in e4m3, one for each 16 columns
    NV4D  g[4] s[2] q[16]         s / g * q                   compressed-tensors' NVFP4

d, z and g are float32. Neighbouring blocks may share their scales; kernels then store them once.
"""

from __future__ import annotations

from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME, GGMLType

BLOCK = 32
OTHER_TYPES = {
    kind.name: kind
    for kind in (
        GGMLType("G4", BLOCK, 24),
        GGMLType("G8", BLOCK, 40),
        GGMLType("B8", BLOCK, 36),
        GGMLType("F8", BLOCK, 36),
        GGMLType("NF4", BLOCK, 20),
        GGMLType("FP4", BLOCK, 20),
        GGMLType("NV4", BLOCK, 22),
        GGMLType("NV4D", BLOCK, 22),
    )
}
BLOCK_TYPES = {**GGML_TYPE_BY_NAME, **OTHER_TYPES}
