"""The image's file and the examples of docs/operate.md say what the server does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from http_server import HttpServer

import ingot.cli.main as cli

pytestmark = pytest.mark.xdist_group("serve")
ROOT = Path(__file__).parents[2]
DOCKERFILE = re.sub(r"\\\n *", "", (ROOT / "Dockerfile").read_text())
PAGE = (ROOT / "docs" / "operate.md").read_text()
VARIABLES = dict(re.findall(r"([A-Z_]+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", DOCKERFILE, re.M))))


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The arguments that the function of `ingot serve` would get."""
    _, bound, *_ = cli.INGOT.parse_args(["serve", *arguments], exit_on_error=False, print_error=False)
    return dict(bound.arguments)


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [*os.environ]:
        if name.startswith("INGOT_SERVE_"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_the_variables_of_the_image_are_options(own_environment: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        own_environment.setenv(name, value)
    assert parsed(["m"]) == {"model": "m", "host": "0.0.0.0", "port": 8000}
    assert "EXPOSE 8000" in DOCKERFILE and "INGOT_CACHE" in VARIABLES
    assert re.findall(r"^FROM (.*)$", DOCKERFILE, re.M) == ["python:3.12-slim"]
    assert re.search(r"^USER (?!root|0)\d+$", DOCKERFILE, re.M), "no root"


@pytest.mark.parametrize("alive", [True, False])
def test_the_health_check(server: HttpServer, alive: bool) -> None:
    found = re.search(r"^HEALTHCHECK .* CMD python -c \"(.*)\"$", DOCKERFILE, re.M)
    assert found is not None
    program = found[1].replace('\\"', '"')
    port = server.url.rpartition(":")[2] if alive else "1"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "INGOT_SERVE_PORT": port}, stderr=subprocess.DEVNULL
    )
    assert (done.returncode == 0) == alive


def test_the_example_of_a_file(own_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = re.search(r"^```yaml\n(# serve.yaml\n.*?)```", PAGE, re.M | re.S)
    assert found is not None
    (tmp_path / "serve.yaml").write_text(found[1])
    options = parsed(["--config", str(tmp_path / "serve.yaml"), "--port", "8001"])
    assert options["port"] == 8001 and options["served_model_name"] == ("pico", "default")
    assert options["log_format"] == "json" and options["model"] == "models/pico"


def test_the_commands_of_the_page(own_environment: pytest.MonkeyPatch) -> None:
    commands = re.findall(r"^    ingot serve (.*)$", PAGE, re.M)
    assert len(commands) == 3
    for command in commands:
        if "--config" not in command:
            parsed(command.split())


def test_the_example_for_kubernetes(own_environment: pytest.MonkeyPatch, server: HttpServer) -> None:
    found = re.search(r"^```yaml\n(containers:\n.*?)```", PAGE, re.M | re.S)
    assert found is not None
    pod = yaml.safe_load(found[1])
    (container,) = pod["containers"]
    options = parsed(container["args"])
    assert pod["terminationGracePeriodSeconds"] >= options["drain_seconds"] + 15
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        request = container[probe]["httpGet"]
        assert server.http.get(request["path"]).status_code == 200 and request["port"] == int(
            VARIABLES["INGOT_SERVE_PORT"]
        )


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


def test_the_manifest_for_kubernetes(own_environment: pytest.MonkeyPatch, server: HttpServer) -> None:
    """Its options exist, its probes answer, and its labels and ports agree with each other."""
    deployment, service = documents("kubernetes.yaml")
    template = deployment["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    (container,) = pod["containers"]
    options = parsed(container["args"])
    assert pod["terminationGracePeriodSeconds"] >= options["drain_seconds"] + 15 and not pod["enableServiceLinks"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == VARIABLES["INGOT_SERVE_PORT"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        request = container[probe]["httpGet"]
        assert server.http.get(request["path"]).status_code == 200 and request["port"] == port["name"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    (pool,) = documents("inference-pool.yaml")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1" and pool["kind"] == "InferencePool"
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    for selector in (*selectors, pool["spec"]["selector"]["matchLabels"]):
        assert selector and selector.items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == "vllm", "whose names of metrics tests/serve/test_metrics.py checks"
    scraped = template["metadata"]["annotations"]
    assert server.http.get(scraped["prometheus.io/path"]).status_code == 200
    assert scraped["prometheus.io/port"] == str(port["containerPort"])
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in pod["volumes"]}


def test_the_commands_of_the_page_on_replicas(own_environment: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^    ingot serve (.*)$", (ROOT / "docs" / "replicas.md").read_text(), re.M)
    assert parsed(command.split())["replicas"] == 2
