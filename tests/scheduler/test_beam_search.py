"""Beam search against transformers on a tiny random model, with the scheduler forking and moving beams."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tokenmill.config.engine import SchedulerConfig
from tokenmill.kv.cache import KVCache
from tokenmill.params import BeamParams, SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.types import Request, RowResult, StepPlan, StepResult, TokenLogprobs

EOS = 3


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


class RecomputingRunner:
    """Follows each row's tokens and runs the whole sequence through the model for every draw."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.rows: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.freed_rows:
            del self.rows[row]
        for new in plan.new_rows:
            self.rows[new.row] = new.prompt_token_ids + new.output_token_ids
        rows = [self._row(p.row, p.num_logprobs) for p in plan.rows if p.sample]
        return StepResult(step=plan.step, rows=rows)

    def _row(self, row: int, count: int | None) -> RowResult:
        with torch.inference_mode():
            logits = self.model(torch.tensor([self.rows[row]])).logits[0, -1]
        top = logits.float().log_softmax(-1).topk(count or 1)
        ids, logprobs = top.indices.tolist(), top.values.tolist()
        self.rows[row] = [*self.rows[row], ids[0]]
        return RowResult(row=row, token_ids=ids[:1], logprobs=[TokenLogprobs(ids[0], logprobs[0], 1, ids, logprobs)])


def searched(
    model: LlamaForCausalLM, prompt: list[int], beam: BeamParams, num_blocks: int
) -> tuple[list[list[int]], int]:
    """The hypotheses, best first, and how often beams were preempted on the way to them."""
    cache = KVCache(windows=[None], num_blocks=num_blocks, block_size=2)
    scheduler = Scheduler(config=SchedulerConfig(token_budget=16), cache=cache, max_rows=16, clock=lambda: 0.0)
    runner = RecomputingRunner(model)
    for name, priority in (("a", 0), ("b", 1)):
        scheduler.add(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                params=SamplingParams(beam=beam, n=beam.width),
                eos_token_ids=[EOS],
                max_tokens=10,
                seed=0,
                priority=priority,
            )
        )
    outputs = []
    while (plan := scheduler.plan()) is not None:
        outputs += scheduler.apply(runner.run(plan))
    found = {name: [o.token_ids for o in outputs if o.request_id == name] for name in ("a", "b")}
    assert found["a"] == found["b"]
    assert cache.num_used == 0
    return found["a"], scheduler.stats().preemptions


@pytest.mark.parametrize("num_blocks", [400, 24])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [True, False])
def test_same_hypotheses_as_transformers(
    model: LlamaForCausalLM, early_stopping: bool, length_penalty: float, num_blocks: int
) -> None:
    width, num_preempted = 4, 0
    for prompt in ([1, 5, 9], [1, 7, 7, 2, 20], [1]):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=10,
                do_sample=False,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=EOS,
                pad_token_id=0,
            ),
        )
        hypotheses = [trimmed(row[len(prompt) :]) for row in expected.tolist()]
        beam = BeamParams(width, length_penalty, early_stopping)
        found, preemptions = searched(model, prompt, beam, num_blocks)
        assert found == hypotheses
        num_preempted += preemptions
    assert (num_preempted > 0) == (num_blocks == 24)


def trimmed(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
