"""The parameters of one generation, validated once, here.

sampling   `SamplingParams`: written by users, sent to the engine process, read by the sampler parts      parameters
with fields of their own: guided decoding, beam search, watermark checks     checks of single values, with errors that
name the parameter

A value that cannot be honoured raises `InvalidRequest` naming the field; later stages do not check again.
"""

from tokenmill.params.parts import (
    INT64_MAX,
    INT64_MIN,
    MAX_CHOICES,
    MAX_GUIDED_BYTES,
    MAX_GUIDED_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_WATERMARK_CONTEXT,
    BeamParams,
    Guided,
    GuidedKind,
    Watermark,
)
from tokenmill.params.sampling import (
    DEVICE_PARAM_SLOTS,
    DEVICE_PARAMS,
    DRY_BREAKERS,
    INTEGERS,
    MAX_BREAKERS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_REGEXES,
    MAX_STOP_STRINGS,
    NUMBERS,
    SamplingParams,
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
]
