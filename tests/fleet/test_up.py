"""`tokenmill up`: the file of a cluster, the choice of a topology, and a cluster that runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import free_port, running
from tokenmill import SamplingParams
from tokenmill.arch.unproven import VARIABLE
from tokenmill.cli import main, up
from tokenmill.cli.up import PlannedGroup, in_order, plan_groups
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.config.cluster import ClusterConfig, GroupConfig, read_cluster, replica_range
from tokenmill.errors import InvalidConfig
from tokenmill.fleet.autoscale import ScaleRange
from tokenmill.fleet.elastic import start_cluster
from tokenmill.fleet.places import CountedPlace, Places
from tokenmill.fleet.virtual import VirtualCoreClient, VirtualDevice, frontend_without_weights, run_virtually
from tokenmill.planner.capacity import Slo
from tokenmill.planner.model import known_model
from tokenmill.planner.plan import Question
from tokenmill.planner.topologies import Asked, named_devices, reason, topologies, virtual_device
from tokenmill.types import PromptRequest

LARGE = "meta-llama/Llama-3.3-70B-Instruct"


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_says_groups_load_and_hosts(tmp_path: Path) -> None:
    assert read_cluster(written(tmp_path, 'model = "x"\n')) == ClusterConfig()
    text = (
        '[[group]]\nreplicas = "2..6"\n[[group]]\nreplicas = 1\ntp = 2\n[scale]\nidle = "2m"\n[load]\nrequests_s = 3\n'
    )
    text += '[hosts]\nlisten = "[::1]:8100"\nkey_file = "k"\n'
    found = read_cluster(written(tmp_path, text))
    assert found.groups == (GroupConfig(2, 6), GroupConfig(1, 1, 2))
    assert (found.least, found.most, found.idle_s, found.load.requests_s) == (3, 7, 120.0, 3)
    assert found.hosts.key_file == tmp_path / "k" and not found.has_roles
    text = '[hosts]\nlisten = "[::1]:8100"\nkey_file = "k"\n'
    assert read_cluster(written(tmp_path, "[[group]]\nreplicas = 5\n" + text)).num_local == 1
    assert read_cluster(written(tmp_path, "[[group]]\nreplicas = 5\n" + text + "local_replicas = 3\n")).num_local == 3
    former = read_cluster(written(tmp_path, "[[group]]\nreplicas = 5\n" + text + "seats = 3\n"))
    assert former.num_local == 3 and "local_replicas" in former.deprecated[0]
    text = '[[group]]\nrole = "prefill"\n[[group]]\nreplicas = "2..4"\nrole = "decode"\n[cache]\nkv_disk_gb = 20\n'
    found = read_cluster(written(tmp_path, text))
    assert found.has_roles and found.groups == (GroupConfig(role="prefill"), GroupConfig(2, 4, role="decode"))
    order = in_order([PlannedGroup(group, EngineConfig(ModelConfig(model="x"))) for group in found.groups])
    assert [one.group.role for one in order] == ["prefill", "decode", "decode", "decode", "decode"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[group]]\nreplica = 2\n", "did you mean replicas"),
        ('[[group]]\nreplicas = "6..2"\n', "must be a number"),
        ("[[group]]\nreplicas = 0\n", "must be a number"),
        ("[[group]]\nreplicas = true\n", "must be a number"),
        ('[[group]]\ntp = "two"\n', "tp must be auto"),
        ("[[group]]\npp = 0\n", "pp must be 1 to"),
        ('[[group]]\nrole = "answer"\n', "any, prefill or decode"),
        ('[[group]]\nrole = "decode"\nreplicas = "0..2"\n', "needs at least one replica"),
        ("[group]\nreplicas = 2\n", r"write \[\[group\]\]"),
        ("[load]\ninput_len = 0\n", "input_len"),
        ("[load]\nrequests_s = -1\n", "requests_s"),
        ('[scale]\nidle = "soon"\n', "idle"),
        ('[hosts]\nlisten = "0.0.0.0:8100"\n', "key_file"),
        ('[hosts]\nlisten = "8100"\nkey_file = "k"\n', "not an address"),
        ("[hosts]\nlocal = false\n", "no machine"),
        ("[[group]]\nreplicas = 40\n[[group]]\nreplicas = 40\n", "1 to 64"),
        ("model = ", "not valid TOML"),
    ],
)
def test_what_a_file_gets_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        read_cluster(written(tmp_path, text))


@pytest.mark.parametrize("text", ["model = 3\n", 'model = ["x"]\n', "slo = 5\n"])
def test_short_forms_that_are_no_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["up", str(written(tmp_path, text)), "--dry-run", "--virtual", "h200x8"]) == 2
    assert "must be text" in capsys.readouterr().err


def test_ranges() -> None:
    assert replica_range(3) == replica_range("3") == (3, 3)
    assert replica_range("0..4") == (0, 4)


# ── the choice ─────────────────────────────────────────────────────────────────────────────────────────


def planned(devices: str, asked: Asked, tpot_s: float = 0.05) -> list[Any]:
    model = known_model(LARGE)
    assert model is not None
    device, number = named_devices(devices)
    return topologies(model, device, number, Question(512, 256, slo=Slo(1.0, tpot_s)), asked)


def test_every_topology_is_planned_and_the_best_is_taken() -> None:
    found = planned("h200x8", Asked(1, 8))
    assert {(one.num_replicas, one.tp) for one in found} == {(8, 1), (4, 2), (2, 4), (1, 8)}
    able = [one for one in found if not one.why_not]
    assert found[0] is able[0] and found[0].requests_s == max(one.requests_s for one in able)
    assert f"{found[0].num_replicas} replicas of tp {found[0].tp}" in reason(found)
    needed = planned("h200x8", Asked(1, 8, requests_s=1.0))
    assert needed[0].num_devices == min(one.num_devices for one in needed if not one.why_not)


def test_what_does_not_fit_is_told() -> None:
    found = planned("h200x1", Asked(1, 1))
    if found[0].why_not:
        with pytest.raises(InvalidConfig, match="no topology"):
            reason(found)
    with pytest.raises(InvalidConfig, match="no topology"):
        reason(planned("rtx4090x2", Asked(1, 2)))
    with pytest.raises(InvalidConfig, match="no replica of 16 ranks"):
        planned("h200x8", Asked(1, 1, tp=16))
    assert all(one.tp == 4 for one in planned("h200x8", Asked(1, 2, tp=4)))


def test_a_replica_may_have_stages() -> None:
    found = planned("h200x8", Asked(1, 8, pp=2))
    assert {(one.num_replicas, one.tp, one.name) for one in found} == {
        (4, 1, "4x1x2"),
        (2, 2, "2x2x2"),
        (1, 4, "1x4x2"),
    }
    assert "2 stages" in reason(found) and all(one.num_ranks == 2 * one.tp for one in found)
    alone = planned("h200x8", Asked(1, 8))[0].plan.memory
    assert found[0].plan.memory.weights < 0.7 * alone.weights, "each has half of the layers"


def test_a_virtual_device_takes_as_long_as_its_plan_says() -> None:
    plan = planned("h200x8", Asked(1, 1, tp=4))[0].plan
    device = virtual_device(plan)
    for rows in (1, 16, 48):
        steps_s = device.step_s + rows * (device.row_s or 0.0) + rows * 128 * device.context_s
        assert steps_s == pytest.approx(plan.roofline.decode_s(rows, 128), rel=0.15)
    assert device.step_s + 512 * device.token_s == pytest.approx(plan.roofline.prefill_s(512), rel=0.15)


def test_a_dry_run_shows_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f'model = "{LARGE}"\nslo = "ttft=1s,tpot=50ms"\n[[group]]\nreplicas = "1..4"\n')
    assert main(["up", str(path), "--dry-run", "--virtual", "h200x8"]) == 0
    shown = capsys.readouterr().out
    assert "Chosen: " in shown and "taken" in shown and "8 × H200" in shown
    assert main(["up", str(path), "--dry-run", "--virtual", "h200x8", "--replicas", "3"]) == 2
    assert "[[group]]" in capsys.readouterr().err
    assert main(["up", str(path), "--dry-run", "--virtual", "h2000x8"]) == 2
    assert "unknown device" in capsys.readouterr().err


def test_groups_leave_devices_to_those_behind_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first group would carry most with all eight, and the second needs some."""
    text = f'model = "{LARGE}"\n[[group]]\nrole = "prefill"\n[[group]]\nrole = "decode"\n'
    assert main(["up", str(written(tmp_path, text)), "--dry-run", "--virtual", "h200x8"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Chosen: 1 replica of tp 4") == 2, shown
    text = f'model = "{LARGE}"\n[[group]]\nreplicas = 2\n[[group]]\ntp = 4\nreplicas = 2\n'
    assert main(["up", str(written(tmp_path, text)), "--dry-run", "--virtual", "h200x8"]) == 2
    assert "no topology does what is asked" in capsys.readouterr().err, "eight are taken by the second group"


def test_of_several_gpus_only_what_has_been_run_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    small = known_model("meta-llama/Llama-3.1-8B-Instruct")
    assert small is not None
    monkeypatch.setattr(up, "devices_of", lambda *_: (small, *named_devices("h200x8")))
    cluster = read_cluster(written(tmp_path, f'model = "{small.name}"\n'))
    (planned,) = plan_groups(cluster, EngineConfig(ModelConfig(model=small.name)), "")
    assert planned.engine.parallel.tp == 1 and "gpu_ranks" in capsys.readouterr().out
    monkeypatch.setenv(VARIABLE, "gpu_ranks")
    (planned,) = plan_groups(cluster, EngineConfig(ModelConfig(model=small.name)), "")
    assert planned.engine.parallel.tp > 1 and "gpu_ranks" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\nkv_disk_gb = -3\n", "kv_disk_gb must be between"),
        ("[parallel]\nep = true\n", "tp is 1"),
        ("[[group]]\ntp = 1\n[parallel]\ndp_attention = true\n", "tp is 1"),
        ("[[group]]\ntp = 1\npp = 7\n", "no replica of 7 ranks"),
    ],
)
def test_a_dry_run_refuses_what_a_start_would(
    tmp_path: Path, stories_dir: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = written(tmp_path, f'model = "{stories_dir}"\n[load]\ninput_len = 64\noutput_len = 600\n{text}')
    assert main(["up", str(path), "--dry-run", "--threads", "2"]) == 2
    assert message in capsys.readouterr().err
    path = written(tmp_path, f'model = "{stories_dir}"\n[load]\ninput_len = 64\noutput_len = 600\n')
    assert main(["up", str(path), "--dry-run", "--threads", "2"]) == 0
    assert "Note: a context of 664 tokens is more than the model's 512." in capsys.readouterr().out


def test_virtual_devices_say_what_they_do_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f'model = "{LARGE}"\n[cache]\nkv_disk_gb = 5\n[parallel]\nep = true\n')
    assert main(["up", str(path), "--dry-run", "--virtual", "h200x8"]) == 0
    assert "Virtual devices do without kv_disk_gb, ep." in capsys.readouterr().out
    key = '[hosts]\nlisten = "127.0.0.1:0"\nkey_file = "k"\n'
    assert main(["up", str(written(tmp_path, f'model = "{LARGE}"\n{key}')), "--dry-run", "--virtual", "h200x8"]) == 2
    assert "no other machine can join" in capsys.readouterr().err


def test_a_topology_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f'model = "{LARGE}"\n[[group]]\nreplicas = "1..4"\n')
    assert main(["up", str(path), "--dry-run", "--virtual", "h200x8", "--take", "2x4"]) == 0
    assert "Chosen: 2x4, by --take" in capsys.readouterr().out
    assert main(["up", str(path), "--dry-run", "--virtual", "h200x8", "--take", "3x3"]) == 2
    assert "no topology '3x3' fits here" in capsys.readouterr().err
    path = written(tmp_path, f'model = "{LARGE}"\n[[group]]\n[[group]]\n')
    for flags in (["--take", "1x8"], ["--search"]):
        assert main(["up", str(path), "--dry-run", "--virtual", "h200x8", *flags]) == 2
        assert "single group" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_takes_what_holds_most(tmp_path: Path) -> None:
    """Two trials of each of the best three, on virtual devices, through the real front and the real benchmark."""
    text = f'model = "{LARGE}"\nslo = "ttft=5s,tpot=1s"\n[[group]]\nreplicas = "1..4"\n'
    path = written(tmp_path, text + "[load]\ninput_len = 64\noutput_len = 8\n")
    command = [sys.executable, "-m", "tokenmill", "up", str(path), "--dry-run", "--virtual", "h200x8"]
    command += ["--max-context", "4096", "--search", "--search-trials", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout
    assert shown.count("Measuring ") == 3 and "planned requests/s" in shown
    words = [line.split() for line in shown.splitlines()]
    tried = [row for row in words if len(row) >= 5 and row[0].isdecimal()][:3]
    assert all(float(row[3]) > 0 for row in tried), "each of them was measured"
    (best,) = (row for row in tried if row[-1] == "taken")
    assert float(best[3]) == max(float(row[3]) for row in tried)
    assert f"Chosen: {best[0]}x{best[1]}, by --take" in shown


# ── running ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_virtual_cluster_answers_and_ends_answers() -> None:
    device = VirtualDevice(start_s=1.0, num_blocks=2000, max_context=4096)

    async def scenario() -> list[int]:
        config = EngineConfig(ModelConfig(model="somebody/no-such-model"))
        frontend, words = frontend_without_weights(config, device, 20)
        places = Places(CountedPlace("virtual", 2, lambda _: VirtualCoreClient(device, words)))
        engine = await start_cluster(frontend, [config] * 2, places, ScaleRange(2, 2))
        assert [(one["state"], one["place"]) for one in engine.replicas()] == [("ready", "virtual")] * 2
        assert places.num_free() == 0
        lengths = []
        for seed in range(30):
            asked = PromptRequest(prompt="Once upon", params=SamplingParams(seed=seed, max_tokens=500))
            lengths.append(sum([len(event.token_ids) async for event in engine.submit(asked)]))
        await engine.close()
        assert places.num_free() == 2
        return lengths

    lengths = run_virtually(scenario())
    assert 8 < sum(lengths) / len(lengths) < 50


def test_a_cluster_runs_from_its_file_scales_to_zero_and_comes_back(tmp_path: Path) -> None:
    script, port = tmp_path / "s.json", free_port()
    script.write_text(json.dumps([{"say": ["Hello there."]}]))
    path = written(
        tmp_path,
        f'model = "scripted:{script}"\n[[group]]\nreplicas = "0..2"\n[scale]\nidle = "1s"\n[server]\nport = [{port}]\n',
    )
    with running(["-m", "tokenmill", "up", str(path)], port) as server:
        server.wait_for("ready")

        def states() -> list[str]:
            return sorted(one["state"] for one in server.http.get("/replicas").json()["data"])

        def wait_for(expected: list[str]) -> None:
            deadline = time.monotonic() + 60
            while states() != expected:
                assert time.monotonic() < deadline, states()
                time.sleep(0.05)

        wait_for(["stopped", "stopped"])
        asked = {"model": "s", "messages": [{"role": "user", "content": "hi"}]}
        answer = server.http.post("/v1/chat/completions", json=asked).json()
        assert answer["choices"][0]["message"]["content"] == "Hello there."
        assert server.http.post("/replicas/scale", json={"replicas": "1..2"}).status_code == 200
        wait_for(["ready", "stopped"])
        refused = server.http.post("/replicas/scale", json={"replicas": "9"})
        assert refused.status_code == 400 and "between 0 and 2" in refused.json()["error"]["message"]
        server.terminate()
        assert server.wait() == 0, server.output()
