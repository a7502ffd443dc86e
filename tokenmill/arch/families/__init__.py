"""The table of model families, by the names in their files."""

from __future__ import annotations

from tokenmill.arch.families.afmoe import AFMOE
from tokenmill.arch.families.apertus import APERTUS
from tokenmill.arch.families.arcee import ARCEE
from tokenmill.arch.families.aria import ARIA
from tokenmill.arch.families.axk1 import AXK1
from tokenmill.arch.families.bailing_hybrid import BAILING_HYBRID
from tokenmill.arch.families.bamba import BAMBA
from tokenmill.arch.families.bloom import BLOOM, MPT
from tokenmill.arch.families.cohere import COHERE
from tokenmill.arch.families.cohere2 import COHERE2
from tokenmill.arch.families.cohere2_moe import COHERE2_MOE
from tokenmill.arch.families.cwm import CWM
from tokenmill.arch.families.dbrx import DBRX
from tokenmill.arch.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA
from tokenmill.arch.families.deepseek_v4 import DEEPSEEK_V4
from tokenmill.arch.families.dots1 import DOTS1, SOLAR_OPEN
from tokenmill.arch.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from tokenmill.arch.families.exaone4 import EXAONE4
from tokenmill.arch.families.exaone_moe import EXAONE_MOE
from tokenmill.arch.families.falcon import FALCON
from tokenmill.arch.families.falcon_h1 import FALCON_H1
from tokenmill.arch.families.flint import FLINT
from tokenmill.arch.families.gemma import GEMMA, VAULTGEMMA
from tokenmill.arch.families.gemma2 import GEMMA2
from tokenmill.arch.families.gemma3 import GEMMA3
from tokenmill.arch.families.gemma3n import GEMMA3N
from tokenmill.arch.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from tokenmill.arch.families.glm import GLM, GLM4
from tokenmill.arch.families.glm4_moe import GLM4_MOE, GLM4V_MOE
from tokenmill.arch.families.gpt2 import GPT2, GPT_BIGCODE
from tokenmill.arch.families.gpt_neo import GPT_NEO
from tokenmill.arch.families.gpt_neox import GPT_NEOX
from tokenmill.arch.families.gpt_oss import GPT_OSS
from tokenmill.arch.families.gptj import CODEGEN, GPTJ
from tokenmill.arch.families.granite import GRANITE
from tokenmill.arch.families.granite_swa import GRANITE_MOE_SWA, GRANITE_SWA
from tokenmill.arch.families.granitemoe import GRANITE_MOE
from tokenmill.arch.families.granitemoehybrid import GRANITE_HYBRID
from tokenmill.arch.families.helium import HELIUM
from tokenmill.arch.families.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE, HY3
from tokenmill.arch.families.hyperclovax import HYPERCLOVAX
from tokenmill.arch.families.jais2 import JAIS2
from tokenmill.arch.families.jamba import JAMBA
from tokenmill.arch.families.kimi_linear import KIMI_LINEAR
from tokenmill.arch.families.kolibri1 import KOLIBRI1
from tokenmill.arch.families.laguna import LAGUNA
from tokenmill.arch.families.lfm2 import LFM2
from tokenmill.arch.families.lfm2_moe import LFM2_MOE
from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.families.llama4 import LLAMA4
from tokenmill.arch.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from tokenmill.arch.families.mellum import MELLUM
from tokenmill.arch.families.mimo_v2 import MIMO_V2
from tokenmill.arch.families.minicpm3 import MINICPM3
from tokenmill.arch.families.minimax_m2 import MINIMAX_M2
from tokenmill.arch.families.minimax_m3 import MINIMAX_M3
from tokenmill.arch.families.ministral3 import MINISTRAL3
from tokenmill.arch.families.mistral import MISTRAL
from tokenmill.arch.families.mixtral import MIXTRAL
from tokenmill.arch.families.nanochat import NANOCHAT
from tokenmill.arch.families.nemotron import NEMOTRON
from tokenmill.arch.families.nemotron_h import NEMOTRON_H
from tokenmill.arch.families.olmo import OLMO2, OLMO3
from tokenmill.arch.families.olmo1 import OLMO
from tokenmill.arch.families.olmo_hybrid import OLMO_HYBRID
from tokenmill.arch.families.olmoe import FLEX_OLMO, OLMOE
from tokenmill.arch.families.opt import BIOGPT, OPT
from tokenmill.arch.families.phi import PHI
from tokenmill.arch.families.phi3 import PHI3, PHI4_MULTIMODAL
from tokenmill.arch.families.phimoe import PHIMOE
from tokenmill.arch.families.qwen2 import MIMO, QWEN2
from tokenmill.arch.families.qwen2_moe import QWEN2_MOE
from tokenmill.arch.families.qwen3 import QWEN3
from tokenmill.arch.families.qwen3_5 import QWEN3_5
from tokenmill.arch.families.qwen3_5_moe import QWEN3_5_MOE
from tokenmill.arch.families.qwen3_moe import QWEN3_MOE, QWEN3_VL_MOE
from tokenmill.arch.families.qwen3_next import QWEN3_NEXT
from tokenmill.arch.families.seed_oss import SEED_OSS
from tokenmill.arch.families.smollm3 import SMOLLM3
from tokenmill.arch.families.stablelm import STABLELM
from tokenmill.arch.families.starcoder2 import STARCODER2
from tokenmill.arch.families.step3p5 import STEP3P5
from tokenmill.arch.families.youtu import YOUTU
from tokenmill.arch.family import Family

ALL: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    MIMO,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL_MOE,
    GEMMA2,
    GEMMA3,
    PHI3,
    PHI4_MULTIMODAL,
    LFM2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    DEEPSEEK_V32,
    GLM_MOE_DSA,
    DEEPSEEK_V4,
    COHERE2,
    ERNIE4_5,
    ERNIE4_5_MOE,
    EXAONE4,
    GEMMA3N,
    GEMMA4,
    GEMMA4_UNIFIED,
    GLM4_MOE,
    GLM4V_MOE,
    GPT_OSS,
    GRANITE,
    HUNYUAN_DENSE,
    HUNYUAN_MOE,
    HY3,
    LFM2_MOE,
    LLAMA4,
    MIMO_V2,
    MINIMAX_M2,
    MINIMAX_M3,
    MINISTRAL3,
    OLMO2,
    OLMO3,
    PHI,
    SEED_OSS,
    SMOLLM3,
    STABLELM,
    STARCODER2,
    STEP3P5,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    BAMBA,
    GRANITE_HYBRID,
    FALCON_H1,
    KIMI_LINEAR,
    NEMOTRON_H,
    ARCEE,
    COHERE,
    CWM,
    GEMMA,
    VAULTGEMMA,
    GLM,
    GLM4,
    GRANITE_SWA,
    HELIUM,
    HYPERCLOVAX,
    JAIS2,
    MINICPM3,
    NEMOTRON,
    YOUTU,
    OLMO,
    APERTUS,
    GPT_NEOX,
    FALCON,
    GPT2,
    GPT_BIGCODE,
    GPT_NEO,
    OPT,
    CODEGEN,
    GPTJ,
    OLMOE,
    FLEX_OLMO,
    GRANITE_MOE,
    GRANITE_MOE_SWA,
    DOTS1,
    SOLAR_OPEN,
    EXAONE_MOE,
    AFMOE,
    LAGUNA,
    MELLUM,
    FLINT,
    COHERE2_MOE,
    ARIA,
    OLMO_HYBRID,
    BAILING_HYBRID,
    JAMBA,
    MAMBA,
    FALCON_MAMBA,
    MAMBA2,
    PHIMOE,
    KOLIBRI1,
    AXK1,
    DBRX,
    BIOGPT,
    BLOOM,
    MPT,
    NANOCHAT,
)

BY_NAME: dict[str, Family] = {family.name: family for family in ALL}
BY_MODEL_TYPE: dict[str, Family] = {model_type: family for family in ALL for model_type in family.model_types}
# Mistral and Mixtral are "llama" in GGUF; what differs is in the metadata.
BY_GGUF_ARCH: dict[str, Family] = {
    arch: family for family in reversed(ALL) if family.gguf for arch in (family.gguf.arch, *family.gguf.other_archs)
}
