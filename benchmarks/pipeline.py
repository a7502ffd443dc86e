"""Stages of a pipeline at work: how busy they are, and how soon a long prompt has its first token.

    python benchmarks/pipeline.py [--stage-ms 20] [--steps 60] [--chunk-ms 40]
    python benchmarks/pipeline.py --model MODEL [--rows 16]      a real model on two stages of one thread each

Sleeping stages run the true core, scheduler, runners and ring, with a model whose layers sleep: on any machine they
show what a pipeline gains where each stage has a device of its own.

    busy        tokens a second of S stages with S lanes of 8 rows each, and with one
    long        seconds to the first token of 8,192 tokens in chunks, four stages with four lanes and with one

Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, ParallelConfig, SchedulerConfig
from tokenmill.engine.build import assemble
from tokenmill.engine.core import EngineCore
from tokenmill.kv.layout import KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import ForwardBatch
from tokenmill.parallel.group import SingleRank
from tokenmill.parallel.stage_link import StageLink
from tokenmill.params import SamplingParams
from tokenmill.runner.ranked import Followers, FollowingSampler, follow
from tokenmill.runner.runner import ModelRunner
from tokenmill.runner.staged import PipelineRunner, StageRunner, run_message
from tokenmill.sampling.sampler import Sampler
from tokenmill.types import Request

VOCAB, HIDDEN, LONG = 64, 8, 8192
SPEC = ModelSpec(
    family="sleeping", vocab_size=VOCAB, hidden_size=HIDDEN,
    layers=(LayerSpec(Gqa(1, 1, 2, 1.0, None), MlpSpec(HIDDEN)),),
    norm_eps=1e-5, max_context=LONG + 64, tied_head=True,
)  # fmt: skip


@dataclass
class Sleeper:
    """A stage whose layers sleep: a fixed time a step, and one for each token of a prompt."""

    step_s: float
    token_s: float
    is_last: bool
    direct: None = None
    best_logits: None = None
    adapter_slots: None = None
    vocab_size: int = VOCAB
    slept_s: float = 0.0

    def forward(self, batch: ForwardBatch, storage: KVStorage, entering: torch.Tensor | None = None) -> torch.Tensor:
        seconds = self.step_s + self.token_s * len(batch.token_ids)
        time.sleep(seconds)
        self.slept_s += seconds
        return torch.zeros(len(batch.logit_rows) if self.is_last else len(batch.token_ids), HIDDEN)

    def logits(self, hidden: torch.Tensor, mode: str = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB)


class Pipeline:
    """A core over sleeping stages, as threads."""

    def __init__(self, stages: int, lanes: int, step_s: float, token_s: float, chunk: int) -> None:
        config = EngineConfig(
            ModelConfig(model="sleeping", max_context=SPEC.max_context, dtype="float32"),
            CacheConfig(num_blocks=2048, kv_dtype="float32", prefix_caching=False),
            SchedulerConfig(max_running=32, token_budget=chunk * lanes, step_ms=0, speculate="off"),
            OpsConfig(device="cpu", backend="reference", threads=1),
            ParallelConfig(pp=stages, lanes=lanes, link="threads"),
        )
        self.models = [Sleeper(step_s, token_s, is_last=number == stages - 1) for number in range(stages)]
        storage = KVStorage(KVLayout.from_spec(SPEC), 2048, 16, torch.device("cpu"))
        pipes = [Pipe(duplex=False) for _ in range(stages)]
        links = [StageLink(pipes[at][0], pipes[(at + 1) % stages][1], reads_ahead=at == 0) for at in range(stages)]
        followers: list[Connection] = []
        for at in range(1, stages):
            ours, theirs = Pipe()
            followers.append(ours)
            runner = self._stage(at, links[at], storage, FollowingSampler(VOCAB, 32, "cpu"))
            work = partial(follow, partial(run_message, runner), at, SingleRank(), theirs)
            threading.Thread(target=work, daemon=True).start()

        def make(own_storage: KVStorage, sampler: Sampler, *_limits: int) -> PipelineRunner:
            own = self._stage(0, links[0], own_storage, sampler)
            return PipelineRunner(own, SingleRank(), Followers(followers), beside=0, depth=lanes)

        first: Any = self.models[0]
        self.core: EngineCore = assemble(config, first, storage, make_runner=make)

    def _stage(self, at: int, link: StageLink, storage: KVStorage, sampler: Sampler) -> StageRunner:
        model: Any = self.models[at]
        return StageRunner(ModelRunner(model, storage, sampler, 32, SPEC.max_context), model, link, is_first=at == 0)

    def ask(self, name: str, prompt: int, num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        self.core.add(
            Request(request_id=name, prompt_token_ids=[1] * prompt, params=params, max_tokens=num_tokens, seed=0)
        )

    def run(self) -> tuple[float, float, int]:
        """Seconds in all, seconds to the first token, tokens."""
        began_s, first_s, count = time.perf_counter(), 0.0, 0
        while self.core.has_work:
            for output in self.core.step():
                first_s = first_s or time.perf_counter() - began_s
                count += len(output.token_ids)
        return time.perf_counter() - began_s, first_s, count


def busy(stages: int, lanes: int, stage_s: float, steps: int) -> tuple[float, float]:
    """(tokens a second, share of the time that a stage sleeps) of 8 rows a lane."""
    pipeline = Pipeline(stages, lanes, stage_s, 0.0, 256)
    for number in range(8 * lanes):
        pipeline.ask(str(number), 4, steps)
    seconds, _, tokens = pipeline.run()
    return tokens / seconds, max(model.slept_s for model in pipeline.models) / seconds


def first_token_s(stages: int, lanes: int, token_s: float) -> float:
    pipeline = Pipeline(stages, lanes, 0.0, token_s, 512)
    pipeline.ask("long", LONG, 1)
    return pipeline.run()[1]


def sleeping(asked: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    print(f"stages that sleep {asked.stage_ms:g} ms a step      tokens/s   busy   against one lane")
    for stages in (2, 3, 4):
        one, one_busy = busy(stages, 1, asked.stage_ms / 1e3, asked.steps)
        several, share = busy(stages, stages, asked.stage_ms / 1e3, asked.steps)
        found[f"pp{stages}"] = {"one_lane_busy": one_busy, "busy": share, "speedup": several / one}
        print(f"  {stages} stages, 1 lane                  {one:10.0f}  {one_busy:5.2f}")
        print(
            f"  {stages} stages, {stages} lanes                 {several:10.0f}  {share:5.2f}   {several / one:.2f} x"
        )
    token_s = asked.chunk_ms / 1e3 / 512
    slow, fast = first_token_s(4, 1, token_s), first_token_s(4, 4, token_s)
    found["long"] = {"one_lane_s": slow, "lanes_s": fast, "ratio": slow / fast}
    print(
        f"first token of {LONG} tokens, 4 stages: {slow:.2f} s with one lane, {fast:.2f} s with four,"
        f" {slow / fast:.2f} x"
    )
    return found


def real(asked: argparse.Namespace) -> dict[str, Any]:
    """Busy shares of the stages of a real model, one thread each."""
    from tokenmill import LLM

    found = {}
    for lanes in (1, 2):
        llm = LLM(asked.model, pp=2, lanes=lanes, threads=1, max_context=1024, speculate="off")
        prompts = [[number + 3] * 8 for number in range(asked.rows)]
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        llm.generate(prompts, params, progress=False)
        runner: Any = llm.core.runner
        before, began_s = runner.stage_seconds(), time.perf_counter()
        llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - began_s
        shares = [(now - then) / seconds for now, then in zip(runner.stage_seconds(), before, strict=True)]
        found[f"lanes{lanes}"] = {"busy": shares, "tokens_s": asked.rows * 64 / seconds}
        busy_shares = " ".join(f"{share:.2f}" for share in shares)
        print(f"{lanes} lanes: {asked.rows * 64 / seconds:8.1f} tok/s, busy {busy_shares}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--chunk-ms", type=float, default=40.0, help="what a stage takes for 512 tokens of a prompt")
    parser.add_argument("--model", help="a real model instead")
    parser.add_argument("--rows", type=int, default=16)
    asked = parser.parse_args()
    print(json.dumps(real(asked) if asked.model else sleeping(asked)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
