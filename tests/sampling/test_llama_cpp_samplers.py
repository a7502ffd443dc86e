"""Our samplers against llama.cpp's own, over the same logits; `tests/goldens/record_llama_samplers.py` recorded those.

Chains stand in our order there too: what is compared is each sampler and how they compose.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import plain_sampler as plain
from tests.support.sampler_rows import new_row, plan
from tokenmill.engine.frontend import tokenizer_of
from tokenmill.params import DRY_BREAKERS
from tokenmill.sampling.fixed_point import to_fixed_probs
from tokenmill.sampling.rows import SamplerRows
from tokenmill.sampling.steps import LOGITS_STEPS, PROBS_STEPS, run_steps, steps_used
from tokenmill.text.token_search import TokenSearch

RECORDING = json.loads((Path(__file__).parents[1] / "goldens" / "llama_samplers.json").read_text())
VOCAB = RECORDING["vocab"]


def logits_of(seed: int) -> torch.Tensor:
    rng = random.Random(seed)
    return torch.tensor([[rng.gauss(0.0, 2.0) for _ in range(VOCAB)]])


def after_steps(logits: torch.Tensor, **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and fixed_probs of one row after all steps."""
    row = new_row(**params)
    rows = SamplerRows(logits.shape[-1], 1, torch.device("cpu"))
    rows.take(row, steps_used(row.params))
    in_use = rows.gather([plan()])
    shaped = run_steps(logits, in_use, LOGITS_STEPS)
    return shaped[0], run_steps(to_fixed_probs(shaped), in_use, PROBS_STEPS)[0]


@pytest.mark.parametrize("case", RECORDING["cases"], ids=lambda case: "-".join(case["params"]) + f"-{case['seed']}")
def test_what_is_left_and_how_likely(case: dict[str, Any]) -> None:
    # llama.cpp counts prompt tokens too where it penalises frequency; here all of the history is output
    _, fixed_probs = after_steps(logits_of(case["seed"]), output=case["history"], **case["params"])
    left = {token: weight / float(fixed_probs.sum()) for token, weight in enumerate(fixed_probs.tolist()) if weight}
    theirs = {int(token): prob for token, prob in case["probs"].items() if prob > 0}
    assert left.keys() >= theirs.keys() and all(left[token] < 1e-6 for token in left.keys() - theirs.keys())
    assert [left[token] for token in theirs] == pytest.approx(list(theirs.values()), abs=2e-6)


@pytest.mark.parametrize("case", RECORDING["dry"], ids=lambda case: case["text"][:12])
def test_dry_with_its_breakers(case: dict[str, Any], smollm2_path: Path) -> None:
    tokenizer = tokenizer_of(smollm2_path)
    assert tokenizer is not None
    assert tokenizer.encode(case["text"], add_special_tokens=False) == case["history"]
    breakers = case["params"].get("dry_sequence_breakers", DRY_BREAKERS)
    single, longer = TokenSearch(tokenizer, tokenizer.vocab_size).breakers(breakers)
    logits = torch.zeros(1, tokenizer.vocab_size)
    shaped, _ = after_steps(logits, prompt=case["history"], dry_break_ids=single, dry_breakers=longer, **case["params"])
    losses = {token: -shaped[int(token)].item() for token in case["losses"]}
    assert losses == pytest.approx(case["losses"], abs=1e-4)


@pytest.mark.parametrize("case", RECORDING["mirostat"], ids=lambda case: str(case["params"]["mirostat_tau"]))
def test_mirostat_keeps_the_same_tokens_after_the_same_draws(case: dict[str, Any]) -> None:
    params = {"mirostat": 2, **case["params"]}
    mu = 2 * case["params"]["mirostat_tau"]
    sizes = set()
    for step in case["steps"]:
        logits = logits_of(step["seed"])
        _, fixed_probs = after_steps(logits, mirostat_mu=mu, **params)
        assert fixed_probs.nonzero().flatten().tolist() == step["kept"]
        sizes.add(len(step["kept"]))
        cut = plain.mirostat(logits[0].double().tolist(), mu)
        mu = plain.mirostat_mu(mu, step["drawn"], cut, new_row(**params).params)
    assert len(sizes) > 3
