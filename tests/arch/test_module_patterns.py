"""The scheme of a module in a quantised checkpoint: patterns of all kinds, and the first match decides."""

from __future__ import annotations

import pytest

from tokenmill.arch.quantization import Quantization, Scheme

EXPERTS, LINEAR = Scheme("mxfp4", 32), Scheme("q8_0", 32)
QUANTIZATION = Quantization(
    "test",
    schemes=(
        (("model.layers.1.mlp", "re:.*experts.*", "model.*.shared.up_proj"), EXPERTS),
        (("model.layers.2.mlp", "Linear"), LINEAR),
    ),
    excluded=("lm_head", "model.language_model.layers.0", "*.router", "model.layers.2.mlp.experts.7"),
)


@pytest.mark.parametrize(
    ("module", "scheme"),
    [
        ("lm_head", None),
        ("model.layers.0.mlp.up_proj", None),  # under the name that the patterns use
        ("model.layers.10.mlp.up_proj", LINEAR),  # not a part of layers.1
        ("model.layers.1.mlp.up_proj", EXPERTS),
        ("model.layers.1.mlp_norm", LINEAR),
        ("model.layers.2.mlp.up_proj", LINEAR),
        ("model.layers.2.mlp.experts.6", EXPERTS),  # an expression of an earlier scheme comes before a later name
        ("model.layers.2.mlp.experts.7", None),
        ("model.layers.3.mlp.experts.7", EXPERTS),
        ("model.layers.3.router", None),
        ("model.layers.3.shared.up_proj", EXPERTS),
    ],
)
def test_the_first_pattern_that_matches_decides(module: str, scheme: Scheme | None) -> None:
    assert QUANTIZATION.scheme_of(module) == scheme


def test_a_module_that_no_pattern_names_is_not_quantised() -> None:
    assert Quantization("test", schemes=((("mlp",), LINEAR),)).scheme_of("model.layers.0.self_attn") is None
