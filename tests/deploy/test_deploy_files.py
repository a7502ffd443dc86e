"""What is shipped for deployment: units that systemd accepts, manifests whose parts fit, a container without root."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tokenmill.cli import main
from tokenmill.cli.service import NAME, unit
from tokenmill.config.server import ServerConfig
from tokenmill.server.middleware import PROBES

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = DEPLOY / "kubernetes" / "tokenmill.yaml"
CHART = DEPLOY / "helm" / "tokenmill"
REQUIRED = {
    "PersistentVolumeClaim": ("v1", {"accessModes", "resources"}),
    "Deployment": ("apps/v1", {"replicas", "selector", "template"}),
    "Service": ("v1", {"selector", "ports"}),
    "PodDisruptionBudget": ("policy/v1", {"selector"}),
    "ScaledObject": ("keda.sh/v1alpha1", {"scaleTargetRef", "triggers"}),
}


def test_the_unit_that_is_shipped_is_the_one_that_is_installed() -> None:
    arguments = ("smollm2:135m", "--api-key-file", "/etc/tokenmill/keys")
    shipped = (DEPLOY / "systemd" / NAME).read_text()
    assert shipped == unit("/opt/tokenmill/bin/tokenmill", arguments, user=False)
    for line in ("Type=notify", "WatchdogSec=60", "DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict"):
        assert line in shipped.splitlines()


@pytest.mark.parametrize("user", [False, True])
def test_systemd_accepts_the_unit(tmp_path: Path, user: bool) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    file = tmp_path / NAME
    file.write_text(unit(sys.executable, ("-m", "100%", "a b"), user=user))
    scope = ["--user"] if user else []
    checked = subprocess.run(
        ["systemd-analyze", *scope, "verify", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    about_us = [line for line in (checked.stdout + checked.stderr).splitlines() if NAME in line]
    assert not about_us, about_us


def test_a_unit_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["service", "install", "--user", "smollm2:135m", "--", "--port", "8001"]) == 0
    assert "systemctl --user enable --now" in capsys.readouterr().out
    text = (tmp_path / ".config/systemd/user" / NAME).read_text()
    assert "serve smollm2:135m --port 8001\n" in text and "WantedBy=default.target" in text
    assert main(["service", "install", "--user"]) == 2 and "--force" in capsys.readouterr().err
    assert main(["service", "install", "--user", "--force"]) == 0
    capsys.readouterr()


def settings_in(arguments: list[str]) -> None:
    names = [word.removeprefix("--").replace("-", "_") for word in arguments if word.startswith("--")]
    assert not [name for name in names if name not in ServerConfig.__dataclass_fields__], names


def check_objects(objects: list[dict[str, Any]]) -> None:
    kinds = {one["kind"]: one for one in objects}
    assert set(kinds) == set(REQUIRED)
    for kind, (version, fields) in REQUIRED.items():
        assert (
            kinds[kind]["apiVersion"] == version
            and fields <= set(kinds[kind]["spec"])
            and kinds[kind]["metadata"]["name"]
        )
    deployment = kinds["Deployment"]["spec"]
    pod = deployment["template"]
    wanted = deployment["selector"]["matchLabels"]
    assert wanted.items() <= pod["metadata"]["labels"].items()
    assert wanted == kinds["Service"]["spec"]["selector"]
    assert wanted == kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert kinds["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in PROBES and asked["port"] in {port["name"] for port in container["ports"]}
    assert kinds["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    claim = pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["spec"]["securityContext"]["runAsNonRoot"]
    arguments = container["args"]
    settings_in(arguments)
    drain_s = int(arguments[arguments.index("--drain-timeout-s") + 1])
    pause_s = int(re.findall(r"sleep\((\d+)\)", str(container["lifecycle"]))[0])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= drain_s + pause_s, "the drain is not cut short"


def test_the_manifests_fit_together_and_this_server() -> None:
    check_objects(list(yaml.safe_load_all(MANIFESTS.read_text())))


def chart_values(**changed: Any) -> dict[str, Any]:
    return {**yaml.safe_load((CHART / "values.yaml").read_text()), **changed}


def chart_objects() -> list[dict[str, Any]]:
    values = chart_values()
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["apiVersion"] == "v2"
    values["autoscaling"]["enabled"] = True
    values["storage"]["className"] = "fast"
    objects = []
    for template in sorted((CHART / "templates").iterdir()):
        objects += list(yaml.safe_load_all(rendered(template.read_text(), values)))
    return objects


def test_the_chart_makes_the_same_objects() -> None:
    check_objects(chart_objects())


def test_the_values_of_the_chart_fit_its_schema_and_name_all_that_it_knows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(chart_values(), schema)
    jsonschema.validate({**chart_values(replicas=3), "global": {}}, schema)
    used = set(re.findall(r"\.Values\.(\w+)", "".join(file.read_text() for file in (CHART / "templates").iterdir())))
    assert used == set(chart_values()) == set(schema["properties"]) - {"global"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 2},
        {"replicas": "2"},
        {"drainSeconds": "40s"},
        {"arguments": "--public-metrics"},
        {"service": {"type": "ClusterIp", "port": 80}},
        {"storage": {"size": "50 GB"}},
        {"resources": {"request": {"cpu": "4"}}},
        {"resources": {"limits": {"memory": "16GB"}}},
        {"autoscaling": {"enabled": True}},
        {"model": ""},
    ],
)
def test_helm_refuses_values_that_the_chart_does_not_know(wrong: dict[str, Any]) -> None:
    """Helm validates all values against the schema before it installs anything."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(chart_values(**wrong), schema)


@pytest.mark.slow  # with `pip install kubernetes-validate`, which brings a hundred megabytes of schemas
@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_objects_fit_the_schemas_of_kubernetes(version: str) -> None:
    """Unknown fields are refused too. KEDA's object has no schema there."""
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for one in [*yaml.safe_load_all(MANIFESTS.read_text()), *chart_objects()]:
        if one["kind"] != "ScaledObject":
            schemas.validate(one, version, strict=True)


def rendered(template: str, values: dict[str, Any]) -> str:
    """The few forms of Helm's templates that the chart uses; KeyError for a value that there is not."""

    def value(path: str) -> Any:
        found: Any = values
        for name in path.removeprefix(".Values.").split("."):
            found = found[name]
        return found

    def each(found: re.Match[str]) -> str:
        return "".join(found[2].replace("{{ . | quote }}", f'"{one}"') for one in value(found[1]))

    text = re.sub(r"\s*\{\{- range (\S+) \}\}(.*?)\s*\{\{- end \}\}", each, template, flags=re.S)
    text = re.sub(
        r"\s*\{\{- with (\S+) \}\}(.*?)\s*\{\{- end \}\}",
        lambda m: m[2].replace("{{ . }}", str(value(m[1]))),
        text,
        flags=re.S,
    )
    text = re.sub(r"\{\{- if \S+ \}\}|\{\{- end \}\}", "", text)
    text = re.sub(
        r"\{\{- toYaml (\S+) \| nindent (\d+) \}\}",
        lambda m: "\n" + "\n".join(" " * int(m[2]) + line for line in yaml.safe_dump(value(m[1])).splitlines()),
        text,
    )
    text = re.sub(r"\{\{ add (\S+) (\S+) (\d+) \}\}", lambda m: str(value(m[1]) + value(m[2]) + int(m[3])), text)
    text = re.sub(r"\{\{ mul (\S+) (\d+) \}\}", lambda m: str(value(m[1]) * int(m[2])), text)
    text = re.sub(r"\{\{ (\.Values\S+) \| quote \}\}", lambda m: f'"{value(m[1])}"', text)
    text = re.sub(r"\{\{ (\.Values\S+) \}\}", lambda m: str(value(m[1])), text)
    text = text.replace("{{ .Release.Name }}", "mine")
    assert "{{" not in text, text
    return text


def test_the_container_has_no_root_no_compiler_and_a_health_check() -> None:
    stages = (DEPLOY / "container" / "Containerfile").read_text().split("\nFROM ")
    last = stages[-1]
    assert len(stages) >= 2 and "g++" in stages[-2] and "g++" not in last
    assert (
        re.search(r"^USER 10001", last, re.M)
        and "VOLUME /models" in last
        and 'ENTRYPOINT ["tokenmill", "serve"]' in last
    )
    assert "/livez" in re.findall(r"HEALTHCHECK.*\n.*", last)[0]
    for name in re.findall(r"TOKENMILL_(?!HOME)([A-Z_]+)=", last):
        assert name.lower() in ServerConfig.__dataclass_fields__


def test_the_bill_of_materials_lists_what_the_package_needs() -> None:
    writer = Path(__file__).parents[2] / "tools" / "write_sbom.py"
    space = runpy.run_path(str(writer))
    plain = space["sbom"]()
    names = {one["name"] for one in plain["components"]}
    assert {"torch", "starlette", "jinja2", "markupsafe", "httptools"} <= names, (
        "also what others need, by their extras"
    )
    assert "pytest" not in names
    assert (plain["bomFormat"], plain["metadata"]["component"]["name"]) == ("CycloneDX", "tokenmill")
    assert all(one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}" for one in plain["components"])
