"""Ranks with GPUs, whose runners are told the same in the same order: all of them compute the same steps.

Each rank's model meets the other's in every call, and compares what both have computed: a rank that launches, draws or
collects in another order, or feeds another token, is found at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from tests.runner.test_cuda_runner import BYTES, CONTEXT, ROWS, answers, core_over, guided_requests, requests
from tests.support.eager_device import CPU, eager_runner
from tokenmill.engine.core import Runner
from tokenmill.errors import PeerDied
from tokenmill.kv.storage import KVStorage
from tokenmill.ops.batch import ForwardBatch, Mode
from tokenmill.parallel.threads import ThreadGroup
from tokenmill.runner.cuda_runner import CudaRunner
from tokenmill.runner.mirrored import IDLE, LARGEST, MirroredRunner, mirror
from tokenmill.runner.ranked import Followers, FollowingSampler, follow
from tokenmill.runner.runner import ModelRunner
from tokenmill.sampling.sampler import Sampler
from tokenmill.testing.scripted_models import ContextModel


class MeetingModel(ContextModel):
    def __init__(self, like: ContextModel, group: ThreadGroup) -> None:
        super().__init__(like.vocab_size, like.layout.windows)
        self._group = group
        self.num_met = 0

    def forward(self, batch: ForwardBatch, storage: KVStorage) -> torch.Tensor:
        return self._meet(super().forward(batch, storage))

    def logits(self, hidden: torch.Tensor, mode: Mode = "eager", adapters: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(self._meet(hidden), mode, adapters)

    def _meet(self, states: torch.Tensor) -> torch.Tensor:
        self.num_met += 1
        first, second = self._group.all_gather(states, [2, 2])
        assert torch.equal(first, second), "ranks have computed different rows"
        return states


@contextmanager
def two_ranks(runner_type: type[CudaRunner]) -> Iterator[Any]:
    """Make the runner of both ranks; the second is a thread."""
    groups, (ours, theirs) = ThreadGroup.make(2), Pipe()
    threads: list[threading.Thread] = []

    def make_runner(model: ContextModel, storage: KVStorage, sampler: Sampler, *_limits: int) -> Runner:
        own, other = (MeetingModel(model, group) for group in groups)
        there = KVStorage(model.layout, storage.num_blocks, storage.block_size, CPU)
        following = FollowingSampler(model.vocab_size, ROWS, CPU)
        follower = runner_type(other, there, following, ROWS, CONTEXT)
        thread = threading.Thread(target=follow, args=(partial(mirror, follower), 1, groups[1], theirs), daemon=True)
        thread.start()
        threads.append(thread)
        return MirroredRunner(runner_type(own, storage, sampler, ROWS, CONTEXT), groups[0], Followers([ours]))

    yield make_runner
    ours.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    theirs.close()


@pytest.mark.parametrize(("num_blocks", "windows"), [(40, (None,)), (60, (None, 9))])
def test_ranks_compute_the_same_steps(
    num_blocks: int, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(eager_runner(monkeypatch)) as make_runner:
        found = answers(*core_over(make_runner, num_blocks, windows), asked=requests)
    assert found == answers(*core_over(ModelRunner, 400, windows))


def test_ranks_draw_by_the_same_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(eager_runner(monkeypatch)) as make_runner:
        found = answers(*core_over(make_runner, 200, vocab=BYTES), asked=guided_requests)
    assert found == answers(*core_over(ModelRunner, 400, vocab=BYTES), asked=guided_requests)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the other rank ends by that
def test_results_without_all_ranks_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that no longer wait for a rank which has ended compute anything."""
    with two_ranks(eager_runner(monkeypatch)) as make_runner:
        core, _ = core_over(make_runner, 200)
        for request in requests()[:2]:
            core.add(request)
        core.step()
        runner: Any = core.runner
        monkeypatch.setattr(MeetingModel, "_meet", lambda _self, states: states)
        runner._group.abort()
        with pytest.raises(PeerDied, match="ended"):
            while core.has_work:
                core.step()


def test_all_ranks_begin_with_the_other_kernels_before_the_first_request() -> None:
    """Loading one may wait for a device on which another rank's exchange waits."""
    own, followers = Mock(depth=2), Mock()
    MirroredRunner(own, Mock(), followers).run_largest_step(8, 16, list)
    assert [call.args[0][:1] for call in followers.send.call_args_list] == [LARGEST, IDLE]
    assert [call[0] for call in own.method_calls][-2:] == ["capture_largest", "next_idle_task"]
