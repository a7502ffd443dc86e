"""`show` against what the gguf package reads from the same file, and the settings against the dataclasses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader

from tokenmill.cli.dispatch import SECTIONS, environment_settings
from tokenmill.cli.flags import flag_name
from tokenmill.cli.output import PullScreen, count, size
from tokenmill.cli.show import command
from tokenmill.config.sampling import SamplingConfig
from tokenmill.params import SamplingParams, Watermark


def test_show_agrees_with_the_gguf_package(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(smollm2_path), json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    tensors = GGUFReader(smollm2_path).tensors
    assert facts["parameters"] == sum(int(tensor.n_elements) for tensor in tensors)
    assert facts["weight_bytes"] == sum(int(tensor.n_bytes) for tensor in tensors)
    assert set(facts["quantisation"]) == {tensor.tensor_type.name for tensor in tensors}
    assert facts["kv_bytes_per_token"]["float16"] == 2 * 30 * 3 * 64 * 2 and facts["fit"][0]["kv_dtype"] == "float16"
    assert facts["max_context"] == 8192 and facts["has_chat_template"] is True
    assert facts["fit"][0]["place"] == "memory"


def test_show_in_words_and_the_template(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(smollm2_path)) == 0
    words = capsys.readouterr().out
    assert "speed here" in words and "tokens/s" in words and "tokenmill run " in words
    assert "134.5 M" in words and "30 × 9 heads of 64, 3 KV heads" in words
    assert "23.0 kB per token, 12.2 kB with --kv-dtype int8" in words
    assert command(str(smollm2_path), template=True) == 0
    assert "<|im_start|>" in capsys.readouterr().out


def test_show_of_a_checkpoint_directory(stories_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(stories_dir), json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["family"] == "llama" and facts["weight_bytes"] > 0


def test_show_says_of_every_config_what_runs_it_or_what_is_missing(
    shared_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = set()
    for file in sorted((shared_dir / "configs").glob("*config.json")):
        if file.name.endswith("hf_quant_config.json"):
            continue
        assert command(str(file), json=True) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["kernels"] if facts["runs"] else facts["missing"] and facts["parameters"], file
        assert not facts["runs"] or facts["needed_bytes"] > 0, file
        assert command(str(file)) == 0
        words = capsys.readouterr().out
        assert "None" not in words and "{" not in words and max(map(len, words.splitlines())) < 260, words
        assert all(told in words for told in ("runs", "parameters", "KV cache", "weights")), words
        seen.add(facts["runs"])
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("Qwen--Qwen3.5-27B", "--speculate mtp"),
        ("deepseek-ai--DeepSeek-V4-Flash", "not used for drafts yet"),
        ("zai-org--GLM-5.2", "--speculate mtp"),
    ],
)
def test_show_reports_a_multi_token_prediction_head(
    name: str, use: str, shared_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(shared_dir / "configs" / f"{name}_config.json")) == 0
    words = capsys.readouterr().out
    assert "1 layer in the file" in words and use in words


def test_show_names_kernels_and_missing_nouns(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(shared_dir / "configs" / "openai--gpt-oss-20b_config.json")) == 0
    words = capsys.readouterr().out
    assert "runs on a CPU  native kernels" in words and "20.9 B" in words and "MXFP4 experts" in words
    assert command(str(shared_dir / "configs" / "Qwen--Qwen3-32B-FP8_config.json")) == 0
    assert "fp8, blocks of 128 × 128" in capsys.readouterr().out
    assert command(str(shared_dir / "configs" / "zai-org--GLM-5_config.json")) == 0
    words = capsys.readouterr().out
    assert "runs on a GPU  Triton kernels" in words and "743.9 B, 41.8 B active" in words
    assert command(str(shared_dir / "configs" / "deepseek-ai--DeepSeek-V4-Flash_config.json")) == 0
    assert "runs on a GPU  Triton kernels" in capsys.readouterr().out
    assert command(str(shared_dir / "configs" / "moonshotai--Kimi-K3_config.json")) == 0
    assert "no: model_type 'kimi_k3' is not implemented" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "costs"),
    [
        ("Qwen--Qwen3-8B", "1 × H200 SXM, $3.50 an hour: $"),
        ("deepseek-ai--DeepSeek-V4-Flash", "4 × H200 SXM, $14.00 an hour: $"),
        ("deepseek-ai--DeepSeek-V3", "8 × H200 SXM, $28.00 an hour: $"),
        ("moonshotai--Kimi-K3", "eight H200 SXM do not hold it"),
        ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", "costs          tokenmill plan"),  # no GPU kernels
    ],
)
def test_show_tells_what_a_config_would_cost(
    config: str, costs: str, shared_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shared_dir / "configs" / f"{config}_config.json"
    assert command(str(path)) == 0
    words = capsys.readouterr().out
    assert costs in words and f"tokenmill plan {path}: memory, speed and price" in words


@pytest.mark.parametrize(
    ("config", "is_offered"),
    [
        ("Qwen--Qwen3-8B", True),
        ("deepseek-ai--DeepSeek-V3", False),
        ("deepseek-ai--DeepSeek-V4-Flash", False),
        ("MiniMaxAI--MiniMax-M3", False),
        ("moonshotai--Kimi-K3", False),
    ],
)
def test_show_offers_a_rounded_cache_only_where_the_engine_has_one(
    config: str, is_offered: bool, shared_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(str(shared_dir / "configs" / f"{config}_config.json")) == 0
    words = capsys.readouterr().out
    assert "per token" in words and ("--kv-dtype int8" in words) is is_offered


def test_no_two_settings_share_a_flag() -> None:
    flags = [flag_name(section, field) for section, kind in SECTIONS.items() for field in kind.__dataclass_fields__]
    assert len(flags) == len(set(flags))


def test_an_empty_variable_sets_nothing() -> None:
    given = {"TOKENMILL_API_KEY": "", "TOKENMILL_STOP": "a,,b"}
    assert environment_settings(given) == {"stop": ["a", "b"]}


def test_sampling_flags_are_sampling_params() -> None:
    assert set(SamplingConfig.__dataclass_fields__) - {"watermark_key"} <= set(SamplingParams.__struct_fields__)
    params = SamplingConfig(temperature=0.0, stop=("a",), seed=3).params()
    assert params == SamplingParams(temperature=0.0, stop=["a"], seed=3)
    assert SamplingConfig(watermark_key=5).params().watermark == Watermark(5)


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 98_362_432, 5e12)] == ["0 B", "999 B", "98.4 MB", "5.0 TB"]
    assert [count(n) for n in (7, 134_515_008, 8.03e9)] == ["7", "134.5 M", "8.0 B"]


class TerminalOutput(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_of_a_pull_is_one_line_on_a_small_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalOutput()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    for file in ("SmolLM2-135M-Instruct.Q4_1.gguf (from PyPI)", "Llama-3.1-405B-Instruct-Q4_K_M-00004-of-00011.gguf"):
        with PullScreen() as screen:
            screen.begin(file, 98_362_432, 0)
            screen.advance(98_362_432)
            screen.end()
    shown = [line for line in terminal.getvalue().splitlines() if "MB" in line]
    assert shown and all("98.4/98.4 MB" in line or "0.0/98.4 MB" in line for line in shown), shown
    assert any("-of-00011.gguf" in line for line in shown)
