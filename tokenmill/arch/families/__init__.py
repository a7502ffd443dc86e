"""All families, by the words their files use."""

from __future__ import annotations

from tokenmill.arch.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from tokenmill.arch.families.gemma2 import GEMMA2
from tokenmill.arch.families.gemma3 import GEMMA3
from tokenmill.arch.families.lfm2 import LFM2
from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.families.mistral import MISTRAL
from tokenmill.arch.families.mixtral import MIXTRAL
from tokenmill.arch.families.phi3 import PHI3
from tokenmill.arch.families.qwen2 import QWEN2
from tokenmill.arch.families.qwen2_moe import QWEN2_MOE
from tokenmill.arch.families.qwen3 import QWEN3
from tokenmill.arch.families.qwen3_moe import QWEN3_MOE
from tokenmill.arch.family import Family

ALL: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    PHI3,
    LFM2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
)

BY_NAME: dict[str, Family] = {family.name: family for family in ALL}
BY_MODEL_TYPE: dict[str, Family] = {model_type: family for family in ALL for model_type in family.model_types}
# Mistral and Mixtral are "llama" in GGUF; what differs is in the metadata.
BY_GGUF_ARCH: dict[str, Family] = {family.gguf.arch: family for family in reversed(ALL) if family.gguf is not None}
