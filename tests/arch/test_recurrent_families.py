"""Configs of published models with recurrent layers: their sizes, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.arch.cost import num_active_parameters, num_parameters
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import Gqa, Mla, MoeSpec
from tokenmill.errors import UnsupportedModel

LING: dict[str, Any] = {  # Ling-3.0-flash's limits and sizes
    "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "num_experts": 512,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "num_hidden_layers": 42, "q_lora_rank": None,
    "partial_rotary_factor": 0.5, "expert_swiglu_limit_list": [0] * 35 + [4] * 7, "linear_silu": True,
    "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2, "moe_shared_expert_intermediate_size": 768,
}  # fmt: skip
CODESTRAL = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}
FALCON = {
    "model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64,
    "vocab_size": 65024, "time_step_rank": 256, "tie_word_embeddings": False,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280}
OLMO = {
    "model_type": "olmo_hybrid", "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 30, "rope_parameters": None, "rope_theta": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (LING, 124e9, 5e9),  # as llama.cpp calls it: 124B.A5B
        (CODESTRAL, 7_285_403_648, None),  # as Mistral announced it
        (FALCON, 7.27e9, None),  # as its page on the hub shows
        (MAMBA, 2.77e9, None),
        ({"model_type": "jamba"}, 51.6e9, 12e9),  # Jamba v0.1: "52B, 12B active"
        (OLMO, 7.4e9, None),
    ],
)
def test_published_sizes(config: dict[str, Any], total: float, active: float | None) -> None:
    spec = spec_from_hf(config)
    assert num_parameters(spec) == pytest.approx(total, rel=0.01 if isinstance(total, float) else 0)
    if active is not None:
        assert num_active_parameters(spec) == pytest.approx(active, rel=0.12)


def test_ling_3_limits_the_activations_of_its_last_experts() -> None:
    layers = spec_from_hf(LING).layers
    found = [layer.mlp.expert.activation for layer in layers if isinstance(layer.mlp, MoeSpec)]
    shared = [layer.mlp.shared.activation for layer in layers if isinstance(layer.mlp, MoeSpec) and layer.mlp.shared]
    assert found == ["silu"] * 33 + ["clamped_silu_4"] * 7
    assert shared == ["silu"] * 32 + ["clamped_silu_5"] * 6 + ["clamped_silu_7"] * 2
    mixers = [layer.mixer for layer in layers]
    assert [index for index, mixer in enumerate(mixers) if isinstance(mixer, Mla)] == [5, 11, 17, 23, 29, 35, 41]
    assert {mixer.lowest_decay for mixer in mixers if isinstance(mixer, Recurrent)} == {-5.0}
    assert {mixer.rope.rotary_dim for mixer in mixers if isinstance(mixer, Mla) and mixer.rope} == {64}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, "lightning attention"),
        ({"no_kda_lora": False}, "no_kda_lora"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "element_wise"),
        ({"expert_swiglu_limit_list": [3] * 42}, "the limit 3"),
        ({"expert_swiglu_limit_list": [4] * 42}, "which has no experts"),
        ({"expert_swiglu_limit_list": [4]}, "an entry for each layer"),
        ({"kda_lower_bound": 1.0}, "kda_lower_bound"),
        ({"moe_shared_expert_intermediate_size": 512}, "moe_shared_expert_intermediate_size"),
        ({"use_qkv_bias": True}, "use_qkv_bias"),
    ],
)
def test_other_models_of_that_type_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        spec_from_hf({**LING, **changes})


def test_olmo_hybrid_rotates_unless_its_theta_is_null() -> None:
    def rotates(**changes: Any) -> bool:
        spec = spec_from_hf({**OLMO, **changes})
        return all(layer.mixer.rope is not None for layer in spec.layers if isinstance(layer.mixer, Gqa))

    assert not rotates() and not rotates(rope_parameters={"rope_theta": None, "rope_type": "default"})
    assert rotates(rope_theta=500000.0) and rotates(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"})
    kinds = [type(layer.mixer) for layer in spec_from_hf(OLMO).layers]
    assert kinds == [Recurrent, Recurrent, Recurrent, Gqa] * 8


def test_what_does_not_fit_together_is_refused() -> None:
    for config, named in (
        ({**CODESTRAL, "num_heads": 100}, "do not fit"),
        ({**MAMBA, "conv_kernel": 1}, "conv_kernel"),
    ):
        with pytest.raises(UnsupportedModel, match=named):
            spec_from_hf(config)
