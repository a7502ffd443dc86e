"""Python frameworks of other makers, as their users install them, against a scripted model: LangChain's own suite of
standard tests for its classes, and a session with each of the others."""

from __future__ import annotations

import json
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client_farm import CLIENTS, Canary, environment_of, python_with, serving_script
from tests.support.client_scripts import QWEN3, call, script

pytestmark = pytest.mark.slow


def with_tool(name: str) -> str:
    """The prompt offers a tool of this name."""
    return f'"name": "{name}"'


CITY = {"name": "Paris", "population": 2_100_000}
JOKE = {"setup": "Why do cats purr?", "punchline": "They can."}
SCRIPT = script(
    {"match": r"Observation:\s+18 degrees", "say": call("final_answer", answer="18 degrees")},
    {"match": "</tool_response><.im_end.>\n<.im_start.>assistant\n$", "say": "It is 18 degrees in Paris, and 3."},
    {"match": with_tool("transfer_to_expert"), "say": call("transfer_to_expert")},
    {"match": with_tool("magic_function_no_args"), "say": call("magic_function_no_args")},
    {"match": with_tool("get_weather"), "say": call("get_weather", location="San Francisco")},
    {"match": with_tool("magic_function"), "say": call("magic_function", input=3)},
    {"match": with_tool("greeting_generator"), "say": call("greeting_generator", answer_style="Pirate")},
    {"match": with_tool("my_adder_tool"), "say": call("my_adder_tool", a=3, b=4)},
    {
        "match": with_tool("unicode_customer") + r"[\s\S]*株式会社",
        "say": call("unicode_customer", customer_name="こんにちは株式会社", description="a customer"),
    },
    {
        "match": with_tool("unicode_customer"),
        "say": call("unicode_customer", customer_name="你好啊集团", description="a customer"),
    },
    {"match": with_tool("JokeDict"), "say": call("JokeDict", **JOKE)},
    {"match": with_tool("[Jj]oke"), "say": call("Joke", **JOKE)},
    {"match": with_tool("final_result"), "say": call("final_result", **CITY)},
    {"match": with_tool("InstructorCity"), "say": call("InstructorCity", **CITY)},
    {"match": with_tool("PartialInstructorCity"), "say": call("PartialInstructorCity", **CITY)},
    {"match": with_tool("weather"), "say": call("weather", city="Paris")},
    {"match": r"Well\?", "say": "yes"},
    *(
        {"match": f"Make edited_by_{route}.py greet", "say": f'edited_by_{route}.py\n```python\nprint("Hello")\n```\n'}
        for route in ("openai", "ollama_chat")
    ),
    {"match": "joke", "say": json.dumps(JOKE)},
    {"match": r"\[\[ ## answer ## \]\]", "say": "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"},
    {"match": "city", "say": json.dumps(CITY)},
    {"say": "Hello there! I am a script."},
)
NEWEST = ("pydantic_ai", "openai_agents", "llm")
OTHERS = ("instructor", "litellm", "llama_index", "haystack", "dspy", "smolagents", "outlines", "guidance")
LOOPS = [f"-oasyncio_default_{kind}_loop_scope=session" for kind in ("test", "fixture")]  # LangChain keeps its client
PROBES = {**dict.fromkeys(NEWEST, "new"), **dict.fromkeys(OTHERS, "frameworks"), "aider": "aider"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, shared_dir: Path) -> Iterator[str]:
    with serving_script(tmp_path_factory.mktemp("served"), SCRIPT, shared_dir / "templates" / QWEN3) as started:
        yield started


def environment(url: str, home: Path, canary: Canary) -> dict[str, str]:
    quiet = {"DO_NOT_TRACK": "1", "HAYSTACK_TELEMETRY_ENABLED": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return environment_of(
        home, canary, SERVER_URL=url, SERVER_MODEL="scripted", LLM_USER_PATH=str(home / "llm"), **quiet
    )


def run_probe(client: str, venv: str, url: str, canary: Canary, folder: Path) -> str:
    """What a program prints that ends well."""
    done = subprocess.run(
        [str(python_with(venv)), str(CLIENTS / "programs" / f"{client}_probe.py")],
        env=environment(url, folder / "home", canary),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("client", PROBES)
def test_a_session_with(client: str, url: str, canary: Canary, tmp_path: Path) -> None:
    run_probe(client, PROBES[client], url, canary, tmp_path)


@pytest.mark.parametrize(("venv", "version"), [("new", "3."), ("old", "2.")])
def test_openais_sdk_over_responses(venv: str, version: str, url: str, canary: Canary, tmp_path: Path) -> None:
    assert run_probe("openai_responses", venv, url, canary, tmp_path).startswith(version)


def test_langchains_standard_tests(url: str, canary: Canary, tmp_path: Path) -> None:
    """41 tests for each class; those of images, audio, PDFs and recorded calls are skipped by the suite itself."""
    report = tmp_path / "report.xml"
    program = shutil.copy(CLIENTS / "programs" / "langchain_standard.py", tmp_path)  # away from our own configuration
    options = ["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", *LOOPS, f"--junitxml={report}"]
    done = subprocess.run(
        [str(python_with("new")), "-m", "pytest", *options, str(program)],
        env=environment(url, tmp_path / "home", canary),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert report.is_file(), done.stdout + done.stderr
    passed: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if not len(case):
            passed[case.attrib["classname"].rsplit(".", 1)[-1]] += 1
    assert done.returncode == 0, done.stdout[-4000:]
    assert all(passed[name] >= 34 for name in ("TestOpenAI", "TestResponses", "TestAnthropic", "TestOllama")), passed
