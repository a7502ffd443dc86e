"""Drafts of a model's own head (`--speculate mtp`): those of transformers' head, and the same answers as without."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_layers import MtpModel

from tests.support.mixed_requests import make_requests, run_together, slow_but
from tests.support.mtp_heads import add_head, make_head
from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidConfig, UnsupportedModel
from tokenmill.ops.cpu import is_available
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.draft_state import DraftRequest

TRAINED = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
TIGHT = {"num_blocks": 60, "max_running": 24, "token_budget": 40}
pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])


def with_head(name: str, shared_dir: Path, folder: Path) -> tuple[transformers.PreTrainedModel, MtpModel]:
    """A trained tiny model in `folder`, with a random head beside it."""
    shutil.copytree(shared_dir / "goldens" / "tiny" / name, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head = make_head(model)
    add_head(head, folder)
    return model, head


@pytest.mark.parametrize("name", slow_but(("deepseek_v3", "qwen3_5"), TRAINED))
def test_answers_are_the_same_with_and_without(name: str, shared_dir: Path, tmp_path: Path) -> None:
    with_head(name, shared_dir, tmp_path / "model")
    asks = make_requests(3, 30)
    alone = run_together(LLM(str(tmp_path / "model"), threads=1, speculate="off"), asks, None)
    for settings in ({}, TIGHT):
        llm = LLM(str(tmp_path / "model"), threads=1, speculate="mtp", **settings)  # type: ignore[arg-type]
        assert run_together(llm, asks, random.Random(1)) == alone
        assert llm.core.stats().drafted_tokens > 100


@pytest.mark.parametrize("name", ["glm4_moe"])
def test_drafts_are_those_of_transformers(
    name: str, shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head = with_head(name, shared_dir, tmp_path / "model")
    found: list[tuple[list[int], list[int]]] = []
    draft = DraftModel.draft

    def recorded(self: DraftModel, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]:
        depths = [min(2, request.max_drafts) for request in requests]
        drafts = draft(self, requests, depths)
        found.extend((list(request.tokens), list(one)) for request, one in zip(requests, drafts, strict=True))
        return drafts

    monkeypatch.setattr(DraftModel, "draft", recorded)
    llm = LLM(str(tmp_path / "model"), threads=1, speculate="mtp", kv_dtype="float32", activation_bits="16")
    prompts = [[1, *range(number, number + 9)] for number in (20, 120, 220)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    compared = [expected_drafts(model, head, tokens, len(drafts)) == drafts for tokens, drafts in found if drafts]
    assert len(compared) > 20 and all(compared)


def expected_drafts(model: transformers.PreTrainedModel, head: MtpModel, tokens: list[int], count: int) -> list[int]:
    """What transformers' head proposes behind `tokens`, going on from its own states."""
    with torch.inference_mode():
        states = model.model(torch.tensor([tokens])).last_hidden_state[:, :-1]
        drafts: list[int] = []
        while len(drafts) < count:
            fed = torch.tensor([[*tokens[1:], *drafts]])
            left = head.forward_layer(0, states, torch.arange(fed.shape[1]).view(1, -1), None, input_ids=fed)
            drafts.append(int(head.shared_head(left[:, -1]).argmax()))
            states = torch.cat([states, left[:, -1:]], dim=1)
    return drafts


def test_models_without_a_head_are_refused_by_name(shared_dir: Path, tmp_path: Path) -> None:
    tiny = shared_dir / "goldens" / "tiny"
    with pytest.raises(InvalidConfig, match="mtp is not supported for mixtral"):
        LLM(str(tiny / "mixtral"), threads=1, speculate="mtp")
    with pytest.raises(UnsupportedModel, match="no multi-token-prediction"):
        LLM(str(tiny / "glm4_moe"), threads=1, speculate="mtp")
    with_head("glm4_moe", shared_dir, tmp_path / "model")
    with pytest.raises(InvalidConfig, match="several ranks"):
        LLM(str(tmp_path / "model"), threads=1, speculate="mtp", tp=2)
