"""The command line as its users meet it: real processes, real pipes, real signals. The model is scripted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cli_process import SCRIPT, in_terminal, one_line, real, scripted
from tests.support.timing import SOON_S
from tokenmill.cli import doctor
from tokenmill.ops.cpu import is_available

# ── help, version, wrong usage ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_and_version_import_nothing_heavy(environment: dict[str, str], arguments: list[str]) -> None:
    code = "import sys; from tokenmill.cli import main; rc = main(sys.argv[1:]); "
    code += "assert not {'torch', 'cyclopts', 'rich', 'numpy'} & set(sys.modules); sys.exit(rc)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tokenmill" in done.stdout


def test_every_verb_in_the_table_has_help(environment: dict[str, str]) -> None:
    from tokenmill.cli import VERBS

    code = "import sys; from tokenmill.cli import VERBS, main; codes = [main([v, '--help']) for v in VERBS]; "
    code += "assert 'torch' not in sys.modules; sys.exit(max(codes))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert f"Usage: tokenmill {verb}" in done.stdout
    assert "--config" in done.stdout
    for clutter in ("None", "()", '""', "False"):
        assert f"[default: {clutter}]" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rn"], ["did you mean run?"]),
        (["--model", "x"], ["command"]),
        (["run", "--tempratur", "1", "hi"], ["--tempratur", "--temperature"]),
        (["run", "--max-waiting=5", "hi"], ["--max-waiting does not apply to run"]),
        (["chat", "--served-name", "me"], ["--served-name does not apply to chat"]),
        (["run", "--threads", "many", "hi"], ["--threads", "many"]),
        (["run", "--temperature", "-1", "hi"], ["temperature", "between"]),
        (["run", "--device", "gpu", "hi"], ["--device"]),
        (["run", "--max-tokens", "1.5", "hi"], ["--max-tokens takes an integer, not 1.5"]),
        (["serve", "--host", "no..where", "--allow-open"], ["no..where", "--host"]),
        (["serve", "--api-key", "", "--port", "0"], ["API key is empty"]),
        (["run", "smollm2", "hi", "there"], ["'there'", "quote"]),
        (["run"], ["there is no prompt"]),
        (["run", "--raw", "--system", "x", "hi"], ["--raw"]),
        (["rm"], ["MODEL"]),
        (["serve", "--max-modl-len", "3"], ["did you mean --max-model-len (vLLM)?"]),
        (["frobnicate"], ["see tokenmill --help"]),
        (["list", "--config"], ["--config"]),
        (["list", "--config", "/does/not/exist.toml"], ["exist.toml"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    environment: dict[str, str], arguments: list[str], words: list[str]
) -> None:
    one_line(real(environment, *arguments), 2, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "smolm2:135m", "hi"], ["did you mean smollm2:135m"]),
        (["run", "./none.gguf", "hi"], ["none.gguf"]),
        (["show", "acme/none"], ["tokenmill pull acme/none"]),
        (["rm", "acme/none"], ["not in the store"]),
    ],
)
def test_failures_are_one_line_and_exit_1(environment: dict[str, str], arguments: list[str], words: list[str]) -> None:
    one_line(real(environment, *arguments), 1, *words)


def test_an_unreachable_model_fails_quickly(environment: dict[str, str]) -> None:
    started = time.monotonic()
    one_line(real(environment, "pull", "acme/none"), 1, "can't be reached")
    assert time.monotonic() - started < SOON_S


# ── run ────────────────────────────────────────────────────────────────────────────────────────────────


def test_run_with_a_prompt_uses_the_default_model(environment: dict[str, str]) -> None:
    done = scripted(environment, "run", "hi there")
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)
    assert sent["messages"] == [{"role": "user", "content": "hi there"}] and sent["model"] == "smollm2:135m"
    assert done.stdout.endswith("}\n") and "\x1b" not in done.stdout
    assert "stream closed" in done.stderr and "model closed" in done.stderr


def test_run_with_model_prompt_system_and_flags(environment: dict[str, str]) -> None:
    flags = [
        "--system",
        "be kind",
        "--temperature",
        "0",
        "--seed",
        "7",
        "--stop",
        "a",
        "--stop",
        "b",
        "--weights-seed",
        "3",
    ]
    sent = json.loads(scripted(environment, "run", "qwen3:0.6b", "hi", *flags).stdout)
    assert sent["messages"][0] == {"role": "system", "content": "be kind"} and sent["model"] == "qwen3:0.6b"
    assert (sent["temperature"], sent["seed"], sent["stop"], sent["weights_seed"]) == (0.0, 7, ["a", "b"], 3)


def test_a_terminal_without_a_character_shows_another(environment: dict[str, str]) -> None:
    done = scripted({**environment, "PYTHONIOENCODING": "ascii"}, "run", "--raw", stdin="caf\u00e9")
    assert done.returncode == 0 and json.loads(done.stdout)["raw"] == "caf?"


def test_run_reads_a_pipe(environment: dict[str, str]) -> None:
    assert json.loads(scripted(environment, "run", stdin="piped\n").stdout)["messages"][-1]["content"] == "piped"
    both = json.loads(scripted(environment, "run", "Summarise:", stdin="text\n").stdout)
    assert both["messages"][-1]["content"] == "Summarise:\n\ntext"
    named = json.loads(scripted(environment, "run", "qwen3:0.6b", stdin="piped").stdout)
    assert named["model"] == "qwen3:0.6b" and named["messages"][-1]["content"] == "piped"
    assert json.loads(scripted(environment, "run", "--raw", stdin="Once").stdout)["raw"] == "Once"


def test_stats_go_to_stderr(environment: dict[str, str]) -> None:
    done = scripted(environment, "run", "--stats", "hi")
    assert "prompt 3 tokens (" in done.stderr and "answer 5 tokens (" in done.stderr and "tokens (" not in done.stdout


def test_a_failed_answer_is_exit_1_and_debug_shows_the_traceback(environment: dict[str, str]) -> None:
    done = scripted(environment, "run", "please fail")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "tokenmill: the answer could not be computed"
    assert "Traceback" not in done.stderr
    bug = scripted(environment, "run", "a bug")
    assert bug.returncode == 1 and "internal error: KeyError" in bug.stderr and "Traceback" not in bug.stderr
    assert "Traceback" in scripted({**environment, "TOKENMILL_DEBUG": "1"}, "run", "a bug").stderr


def test_a_reader_that_leaves_is_no_error(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "forever"], env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == "..."
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 141
    assert "Traceback" not in errors and "BrokenPipe" not in errors and "stream closed" in errors
    process.stderr.close()


def test_ctrl_c_ends_a_run_with_130(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "forever"], env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stream closed" in errors and "model closed" in errors and "Traceback" not in errors


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────


def test_flags_win_over_environment_over_file(environment: dict[str, str], tmp_path: Path) -> None:
    settings = tmp_path / "s.toml"
    for_others = "[server]\nport = 1\n[scheduler]\nmax_waiting = 5\n"  # run has no flags for these
    settings.write_text("[model]\nmax_context = 100\nseed = 5\n[ops]\nthreads = 1\n[sampling]\nseed = 9\n" + for_others)
    with_file = ["run", "hi", "--config", str(settings)]
    assert json.loads(scripted(environment, *with_file).stdout)["max_context"] == 100
    environment |= {"TOKENMILL_MAX_CONTEXT": "200", "TOKENMILL_STOP": "x,y"}
    sent = json.loads(scripted(environment, *with_file, "--threads", "4").stdout)
    assert (sent["max_context"], sent["threads"], sent["stop"]) == (200, 4, ["x", "y"])
    assert (sent["seed"], sent["weights_seed"]) == (9, 5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nmax_contxt = 1", ["max_contxt", "did you mean max_context?"]),
        ("[modle]\nx = 1", ["[modle]", "did you mean model?"]),
        ("model = 3", ["[model]"]),
        ("[model", ["not valid TOML"]),
        ("[model]\nmax_context = [1, 2]", ["one value"]),
        ('[ops]\nthreads = "many"', ["threads", "many"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    environment: dict[str, str], tmp_path: Path, text: str, words: list[str]
) -> None:
    (tmp_path / "s.toml").write_text(text)
    one_line(real(environment, "run", "hi", "--config", str(tmp_path / "s.toml")), 2, *words)


@pytest.mark.parametrize("name", ["MAX_CONTXT", "MAX_MODEL_LEN"])
def test_a_variable_that_names_no_setting_is_refused(environment: dict[str, str], name: str) -> None:
    one_line(real({**environment, f"TOKENMILL_{name}": "1"}, "list"), 2, "did you mean TOKENMILL_MAX_CONTEXT?")


# ── chat ───────────────────────────────────────────────────────────────────────────────────────────────


def test_chat_from_a_pipe_remembers_and_obeys(environment: dict[str, str]) -> None:
    said = "first\n/system be kind\n/set temperature 0.5\n/set stop_regex \\d\nsecond \\\nline\n"
    said += '/clear\n"""\nblock\nof lines\n"""\n/exit\nnever\n'
    done = scripted(environment, "chat", stdin=said)
    assert done.returncode == 0, done.stderr
    sent = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert sent[1]["messages"][-1]["content"] == "second \nline" and sent[1]["temperature"] == 0.5
    assert [m["content"] for m in sent[2]["messages"]] == ["be kind", "block\nof lines"]
    assert len(sent) == 3 and r"(stop_regex = ('\\d',))" in done.stdout


def test_chat_survives_wrong_commands_and_failed_answers(environment: dict[str, str]) -> None:
    said = "/sytem x\n/set temprature 1\n/set temperature hot\n/set top_p 7\nfail\nhello\n/set seed\n"
    done = scripted(environment, "chat", stdin=said)
    assert done.returncode == 0
    complaints = [line for line in done.stderr.splitlines() if line.startswith("!")]
    assert len(complaints) == 5
    assert "did you mean /system?" in complaints[0] and "did you mean temperature?" in complaints[1]
    sent = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert sent["messages"] == [{"role": "user", "content": "hello"}]
    assert "(seed = None)" in done.stdout


def test_ctrl_c_in_a_terminal_stops_the_answer_not_the_program(environment: dict[str, str]) -> None:
    with in_terminal({**environment, "TERM": "dumb"}, "chat") as screen:
        screen.expect(b">>> ")
        screen.type(b"forever\n")
        screen.expect(b".....")
        screen.type(b"\x03")
        screen.expect(b"(stopped)")
        screen.expect(b">>> ")
        # a signal between the prompt and Python's wait for input is noticed only with the next key
        screen.type_until(b"\x03", b"(Ctrl-D or /exit to leave)")
        screen.type(b"hello\n")
        screen.expect(b'"content": "hello"')
        screen.type(b"/exit\n")
        screen.expect(b"model closed")


# ── store verbs ────────────────────────────────────────────────────────────────────────────────────────


def test_list_of_an_empty_store_and_of_the_catalog(environment: dict[str, str]) -> None:
    assert "tokenmill pull" in real(environment, "list").stdout
    assert json.loads(real(environment, "list", "--json").stdout) == []
    catalog = json.loads(real(environment, "list", "--catalog", "--json").stdout)
    assert catalog[0]["name"] == "smollm2:135m" and catalog[0]["here"] is False
    assert catalog[0]["size_bytes"] == 98_362_432
    planned = {row["name"]: row["planned_bytes"] for row in catalog}
    assert 4e9 < planned["llama3.1:8b"] < 5.5e9 and min(planned.values()) > 5e7


def test_doctor_of_a_fresh_machine(environment: dict[str, str]) -> None:
    done = real(environment, "doctor")
    assert done.returncode == 0, done.stderr
    for title in ("Hardware", "Packages", "Store", "Chosen for this machine", "To fix"):
        assert f"\n{title}\n" in done.stdout
    assert "no model yet" in done.stdout
    assert is_available()[1] in done.stdout and (not is_available()[0]) == ("many times slower" in done.stdout)


def test_doctor_says_what_is_lost_without_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "is_available", lambda: (False, "the native kernels were not built"))
    assert doctor.command() == 0
    shown = capsys.readouterr().out
    assert "the native kernels were not built" in shown.partition("Packages")[0]
    assert "many times slower" in shown.partition("To fix")[2]


def test_doctor_names_a_damaged_model(environment: dict[str, str]) -> None:
    from tokenmill.store import Manifest, Store, StoredFile

    store = Store(environment["TOKENMILL_HOME"])
    store.prepare()
    source = store.root / "partial" / "x"
    source.write_bytes(b"GGUF")
    store.install(Manifest(name="a/b", source="test", files=[StoredFile("x.gguf", "0" * 64, 4)]), {"x.gguf": source})
    store.blob_path("0" * 64).write_bytes(b"")
    done = real(environment, "doctor")
    assert done.returncode == 1 and "a/b is damaged: tokenmill rm a/b" in done.stdout
    assert real(environment, "rm", "a/b").returncode == 0
    assert "no model yet" in real(environment, "doctor").stdout
