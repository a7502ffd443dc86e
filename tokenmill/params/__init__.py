"""The parameters of one generation, validated once, here.

`SamplingParams` is created by users, sent to the engine process and read by the sampler. An invalid value raises
`InvalidRequest` with the field's name; later stages do not check again.
"""

from tokenmill.params.guided import MAX_GUIDED_BYTES, MAX_GUIDED_CHOICES, Guided, GuidedKind, is_gbnf
from tokenmill.params.sampling import (
    DEVICE_PARAM_SLOTS,
    DEVICE_PARAMS,
    DRY_BREAKERS,
    INT64_MAX,
    INT64_MIN,
    INTEGERS,
    MAX_BREAKERS,
    MAX_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_REGEXES,
    MAX_STOP_STRINGS,
    MAX_WATERMARK_CONTEXT,
    NUMBERS,
    BeamParams,
    SamplingParams,
    Watermark,
)

__all__ = [
    "DEVICE_PARAMS",
    "DEVICE_PARAM_SLOTS",
    "DRY_BREAKERS",
    "INT64_MAX",
    "INT64_MIN",
    "INTEGERS",
    "MAX_BREAKERS",
    "MAX_CHOICES",
    "MAX_GUIDED_BYTES",
    "MAX_GUIDED_CHOICES",
    "MAX_LENGTH_PENALTY",
    "MAX_LOGIT_BIAS",
    "MAX_STOP_LENGTH",
    "MAX_STOP_REGEXES",
    "MAX_STOP_STRINGS",
    "MAX_WATERMARK_CONTEXT",
    "NUMBERS",
    "BeamParams",
    "Guided",
    "GuidedKind",
    "SamplingParams",
    "Watermark",
    "is_gbnf",
]
