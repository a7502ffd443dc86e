"""A plan learns from a server that was under load: what it predicts then is what the server did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.arch.cost import prefill_flops
from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.bench.load import LoadRun
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.result import write_result
from tokenmill.cli import main
from tokenmill.errors import InvalidConfig
from tokenmill.planner.calibrate import NEEDED, Served, served_speeds
from tokenmill.planner.device import plan_device
from tokenmill.planner.model import PlannedModel
from tokenmill.planner.plan import Question, make_plan
from tokenmill.planner.roofline import Roofline

CONFIG = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
          "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256}  # fmt: skip
MODEL = PlannedModel("1b", spec_from_hf(CONFIG), "bfloat16")
PROMPT, ANSWER = 256, 64


def machine() -> Roofline:
    """2 ms fixed, 9 GB/s, 300 GFLOP/s."""
    roofline = make_plan(MODEL, plan_device("H200"), Question()).roofline
    speeds = replace(roofline.speeds, bandwidth_bytes_s=9e9, decode_flops_s=3e11, step_s=2e-3, overlap=False)
    return replace(roofline, speeds=speeds)


def served(batches: tuple[int, ...]) -> list[Served]:
    """For each batch size so many requests that run side by side, one size after the other."""
    told, now = [], 0.0
    for batch in batches:
        step = machine().decode_s(batch, PROMPT + ANSWER // 2)
        prefill = prefill_flops(MODEL.spec, PROMPT) / 2e11
        for number in range(batch):
            queue = prefill * number if batch > 1 else 0.0  # the later ones waited
            told.append(Served(PROMPT, ANSWER, now - queue, now + prefill, now + prefill + step * (ANSWER - 1)))
        now += prefill + step * ANSWER + 1
    return told


def test_steps_that_were_not_seen_are_predicted() -> None:
    speeds = served_speeds(served((1, 4, 16)), MODEL, "bfloat16")
    fitted = replace(machine(), speeds=speeds)
    for batch in (1, 2, 8, 32):
        true = machine().decode_s(batch, PROMPT + ANSWER // 2)
        assert fitted.decode_s(batch, PROMPT + ANSWER // 2) == pytest.approx(true, rel=0.03)
    assert speeds.prefill_flops_s == pytest.approx(2e11, rel=0.4)  # from the few that did not wait


def test_the_command_takes_a_server_s_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, result = tmp_path / "config.json", tmp_path / "served.json"
    config.write_text(json.dumps(CONFIG))
    records = [
        BenchRecord(sent_s=s.sent_s, times_s=[s.first_s, s.last_s], end_s=s.last_s, status=200,
        input_tokens=s.input_len,
               output_tokens=s.output_len)
        for s in served((1, 4, 16))
    ]  # fmt: skip
    write_result(result, {"benchmark": "serve"}, LoadRun(records=records))
    question = ["--input-len", str(PROMPT), "--output-len", str(ANSWER), "--batch", "8", "--device", "H200", "--json"]
    assert main(["plan", str(config), *question, "--calibrate", str(result)]) == 0
    plan = json.loads(capsys.readouterr().out)
    true = machine().decode_s(8, PROMPT + ANSWER // 2)
    assert plan["is_calibrated"] and plan["tpot_s"] == pytest.approx(true, rel=0.05)


def test_nothing_can_be_learnt_from_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidConfig, match="several tokens"):
        served_speeds([Served(10, 1, 0.0, 1.0, 1.0)], MODEL, "bfloat16")
    other = tmp_path / "other.json"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    for results in (None, 5, ["x"], [dict.fromkeys(NEEDED, 0)], [dict.fromkeys(NEEDED, "1")], [{"decode_tok_s": 1}]):
        other.write_text(json.dumps({"benchmark": "offline", "results": results}))
        assert main(["plan", str(config), "--device", "H200", "--calibrate", str(other)]) == 2
        assert "bench serve" in capsys.readouterr().err
