"""Settings: small frozen dataclasses, composed, not inherited. A config is never changed after its creation.

`auto` (or None) values are resolved by `engine/resolve.py`, a pure function that returns a new config and the reasons,
which are printed at start. The command line, TOML files and environment variables all set these fields.
"""

from tokenmill.config.engine import (
    ActivationBits,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    OpsConfig,
    ParallelConfig,
    SchedulerConfig,
)

__all__ = [
    "ActivationBits",
    "CacheConfig",
    "EngineConfig",
    "ModelConfig",
    "OpsConfig",
    "ParallelConfig",
    "SchedulerConfig",
]
