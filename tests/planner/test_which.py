"""Well-known models planned without their files, and devices ranked for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenmill.arch.cost import num_parameters
from tokenmill.cli import main
from tokenmill.errors import UnknownModel
from tokenmill.planner.capacity import Slo
from tokenmill.planner.model import find_model, known_configs
from tokenmill.planner.plan import Question
from tokenmill.planner.which import rank_devices, rows, verdict
from tokenmill.store.catalog import load_catalog


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))


def test_every_name_of_the_catalog_is_planned_offline() -> None:
    for name, entry in load_catalog().items():
        model = find_model(name)
        assert model.stored_dtype.lower() in entry.file.lower().replace("_m.gguf", ".gguf"), name
    assert num_parameters(find_model("llama3.1:8b").spec) == 8_030_261_248


def test_well_known_models_of_the_hub_are_planned_offline() -> None:
    assert len(known_configs()) >= 60
    for name in known_configs():
        assert num_parameters(find_model(name).spec) > 1e8, name
    assert find_model("openai/GPT-OSS-20b").stored_dtype == "mxfp4"
    assert find_model("deepseek-ai/DeepSeek-V3").stored_dtype == "fp8"
    with pytest.raises(UnknownModel, match="tokenmill pull"):
        find_model("nobody/knows-this")


def test_devices_are_ranked_by_price_within_the_limits() -> None:
    question = Question(slo=Slo(ttft_s=1.0, tpot_s=0.05))
    options = rank_devices(find_model("llama3.1:8b"), question)
    priced = [option.plan.price.usd_per_request for option in options if option.plan and option.plan.price]
    assert len(priced) > 20 and priced == sorted(priced)
    assert all(option.plan.best.tpot_s <= 0.05 for option in options if option.plan and option.plan.best)
    kinds = [option.order[0] for option in options]
    assert kinds == sorted(kinds) and kinds[-1] == 2 and options[-1].why_not
    assert verdict(options).startswith(f"Cheapest: 1 × {options[0].device}, $")
    assert len(rows(options)) == len(options)
    # Without a price, the fewest that keep the limits.
    unpriced = {option.device: option.plan for option in options if option.plan and option.plan.price is None}
    assert unpriced["GB200"].question.split.num_devices == 1 and unpriced["M3 Ultra"].question.split.num_devices == 2


def test_a_large_model_takes_several(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "meta-llama/Llama-3.3-70B-Instruct", "--which", "--device", "h100 sxm,l4,M1"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]
    assert found[0]["device"] == "H100 SXM" and found[-1] == {"device": "M1", "why_not": "does not fit 8 of them"}
    assert main(asked) == 0
    assert "4 × H100 SXM" in capsys.readouterr().out
    assert main([*asked, "--fit"]) == 2
