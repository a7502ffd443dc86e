"""The spec and settings of a scripted model. Does not import torch.

A script (`text/script.py`) has no weights and takes no time to load; scheduler, KV pool, sampler, grammars and both
processes are the same as for other models. Settings of weights and kernels would have no effect, so they are refused.
"""

from __future__ import annotations

from dataclasses import fields, replace

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, ParallelConfig
from tokenmill.errors import InvalidConfig
from tokenmill.text.script import HIDDEN_SIZE, Script
from tokenmill.text.tokenizer import Tokenizer

NUM_BLOCKS = 1 << 16  # of 16 tokens by default: a million tokens of 16 bytes each
MAX_ROWS, TOKEN_BUDGET = 64, 8192
REFUSED_SETTINGS = {  # they have no effect on a scripted model
    "model": (ModelConfig, ("load_format", "dtype", "quantization", "seed")),
    "cache": (CacheConfig, ("memory_fraction", "kv_dtype", "kv_host_gb")),
    "ops": (OpsConfig, ("device", "backend", "activation_bits", "deterministic", "threads")),
    "parallel": (ParallelConfig, ("tp", "pp", "lanes", "ep", "expert_loads", "expert_copies", "link")),
}


def scripted_spec(script: Script, tokenizer: Tokenizer) -> ModelSpec:
    """Return the spec of a model with one small layer, from which the KV pool and `ModelInfo` are made."""
    layer = LayerSpec(Gqa(1, 1, 2, 1.0, None), MlpSpec(HIDDEN_SIZE))
    return ModelSpec(
        family="scripted",
        vocab_size=tokenizer.vocab_size,
        hidden_size=HIDDEN_SIZE,
        layers=(layer,),
        norm_eps=1e-5,
        max_context=script.max_context,
        tied_head=True,
        eos_token_ids=tuple(tokenizer.eos_token_ids),
    )


def scripted_config(config: EngineConfig, script: Script) -> EngineConfig:
    """Return the complete settings of a scripted model; refuse those that would have no effect."""
    for part, (kind, names) in REFUSED_SETTINGS.items():
        defaults = {field.name: field.default for field in fields(kind)}
        for name in names:
            if getattr(getattr(config, part), name) != defaults[name]:
                problem = f"{name} has no effect on a scripted model, which has no weights"
                raise InvalidConfig(problem, param=name)
    limit = config.model.max_context or script.max_context
    if limit > script.max_context:
        raise InvalidConfig(f"max_context is {limit}, but the script's is {script.max_context}", param="max_context")
    scheduler = replace(
        config.scheduler,
        max_running=config.scheduler.max_running or MAX_ROWS,
        token_budget=config.scheduler.token_budget or TOKEN_BUDGET,
    )
    return replace(
        config,
        model=replace(config.model, max_context=limit, dtype="float32"),
        cache=replace(config.cache, num_blocks=config.cache.num_blocks or NUM_BLOCKS, kv_dtype="float32"),
        scheduler=scheduler,
        ops=replace(config.ops, device="cpu", backend="reference", threads=1),
    )
