"""The reference's choice of experts where a step wants nothing from the last layer: a chunk within a prompt."""

from __future__ import annotations

import torch

from tokenmill.arch.spec import RoutingSpec
from tokenmill.ops.interface import Routing
from tokenmill.ops.reference.experts import route


def test_groups_of_experts_for_no_tokens_at_all() -> None:
    routing = Routing(2, RoutingSpec(score="sigmoid", num_groups=4, kept_groups=2))
    weights, ids = route(torch.randn(0, 8), routing)
    assert weights.shape == ids.shape == (0, 2)
