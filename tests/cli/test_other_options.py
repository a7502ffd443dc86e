"""Command lines of people who come from other engines: the same meaning is taken, another one is explained."""

from __future__ import annotations

import pytest

from tokenmill.cli.dispatch import OPENING, build_app, flags_of, with_our_names
from tokenmill.cli.flags import flag_name
from tokenmill.config.other_names import OTHER_NAMES, SHORT
from tokenmill.errors import InvalidConfig


@pytest.fixture(scope="module")
def known() -> list[str]:
    return flags_of(build_app("serve", None), "serve")


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        # vllm serve
        ("m --max-model-len 4096", "m --max-context 4096"),
        ("m --max-model-len=4096 --port 1", "m --max-context 4096 --port 1"),
        ("m --max-num-seqs 8 --max-num-batched-tokens 512", "m --max-running 8 --token-budget 512"),
        ("m --enable-prefix-caching", "m --prefix-caching"),
        ("m --no-enable-prefix-caching", "m --no-prefix-caching"),
        ("m --dtype half", "m --dtype float16"),
        ("m --kv-cache-dtype fp8_e4m3", "m --kv-dtype fp8"),
        ("m --served-model-name me --api-key k", "m --served-name me --api-key k"),
        ("m --tensor-parallel-size 1 --gpu-memory-utilization 0.9", "m"),
        ("m --tensor-parallel-size 4 --enable-expert-parallel", "m --tp 4 --ep"),
        ("m --enable-auto-tool-choice --quantization awq", "m --quantization none"),
        # sglang
        ("--model-path m --context-length 4096", "--model m --max-context 4096"),
        ("m --disable-radix-cache", "m --no-prefix-caching"),
        ("m --tp-size 2 --ep-size 1 --enable-dp-attention", "m --tp 2 --dp-attention"),
        # llama-server
        (
            "-m m.gguf -c 4096 -np 4 -t 2 -ngl 99",
            "--model m.gguf --max-context 4096 --max-running 4 --threads 2 --device auto",
        ),
        ("-hf o/m -ngl 0 -fa on --jinja --metrics", "--model o/m --device cpu"),
        ("m --flash-attn --port 1", "m --port 1"),
        ("m --ctx-size 512 -ctk q8_0", "m --max-context 512 --kv-dtype int8"),
        # ours
        ("m --max-context 5 --threads 2 -- --max-model-len", "m --max-context 5 --threads 2 -- --max-model-len"),
    ],
)
def test_the_same_meaning_is_taken(known: list[str], given: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_our_names(given.split(), known) == ours.split()
    assert bool(capsys.readouterr().err) == (given != ours)  # a note says what it is called here


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--data-parallel-size 2", "--tp"),
        ("--ep-size 2", "--ep distributes whole experts"),
        ("--gpu-memory-utilization 0.5", "--memory-fraction"),
        ("--trust-remote-code", "never run"),
        ("--enforce-eager", "captured"),
        ("--tool-call-parser hermes", "--tool-format"),
        ("--speculative-model m", "--speculate draft:MODEL"),
        ("--swap-space 4", "recomputed"),
        ("--allowed-origins *", "--cors-origin"),
        ("-ngl 20", "as a whole"),
        ("--mlock", "LimitMEMLOCK"),
        ("--max-model-len", "needs a value"),
    ],
)
def test_another_meaning_is_explained(known: list[str], given: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        with_our_names(given.split(), known)


def test_names_lead_to_settings_that_there_are_and_never_open_a_server(known: list[str]) -> None:
    options = {*known, *flags_of(build_app("run", None), "run")}
    for name, other in OTHER_NAMES.items():
        assert f"--{flag_name('', name)}" not in options, name
        if other.ours:
            assert f"--{flag_name('', other.ours)}" in options, name
            assert flag_name("", other.ours) not in OPENING, name
    assert all(name in OTHER_NAMES or f"--{name}" in options for name in SHORT.values())
    assert all(f"--{name}" in options for name in OPENING)
