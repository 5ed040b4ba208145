"""The compose file, as the compose command itself reads it, and its promises."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
VARIABLES = {"SPECRANK_MODELS": "./runs/demo/models", "REDIS_PASSWORD": "test-only"}


def compose() -> dict[str, dict[str, dict[str, object]]]:
    found: dict[str, dict[str, dict[str, object]]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return found


def test_every_service_has_health_limits_and_a_pinned_image() -> None:
    services = compose()["services"]
    assert set(services) == {"kafka", "redis", "worker", "api", "producer"}
    for name, service in services.items():
        assert "mem_limit" in service, name
        assert ":" in str(service["image"]) and not str(service["image"]).endswith(":latest"), name
        if name != "producer":
            assert "healthcheck" in service, name
        for other, how in dict(service.get("depends_on", {})).items():  # type: ignore[call-overload]
            assert how == {"condition": "service_healthy"}, (name, other)
    assert "container_name" not in services["worker"], "a fixed name cannot be scaled"
    assert "ports" not in services["worker"]


def test_no_secret_has_a_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert "${REDIS_PASSWORD:-" not in text
    assert text.count("${REDIS_PASSWORD:?") == text.count("${REDIS_PASSWORD")


def test_the_commands_and_settings_exist() -> None:
    from downstream.settings import ApiSettings
    from solaris.app_settings import KafkaWorkerSettings

    services = compose()["services"]
    for name, settings, prefix in (
        ("worker", KafkaWorkerSettings, "SPECRANK_WORKER_"),
        ("api", ApiSettings, "SPECRANK_API_"),
    ):
        for variable in services[name]["environment"]:  # type: ignore[attr-defined]
            assert variable.removeprefix(prefix).lower() in settings.model_fields, variable


def command() -> list[str] | None:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    found = shutil.which("docker")
    if found and subprocess.run([found, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [found, "compose"]
    return None


@pytest.mark.skipif(command() is None, reason="neither docker-compose nor docker compose is installed")
def test_compose_reads_the_file_and_names_missing_variables() -> None:
    base = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    ask = [*(command() or []), "-f", str(ROOT / "docker-compose.yml"), "config"]
    good = subprocess.run(ask, env=base | VARIABLES, capture_output=True, text=True, timeout=60, check=False)
    assert good.returncode == 0, good.stderr
    assert set(yaml.safe_load(good.stdout)["services"]) == set(compose()["services"])
    for missing in VARIABLES:
        given = {name: value for name, value in VARIABLES.items() if name != missing}
        bad = subprocess.run(ask, env=base | given, capture_output=True, text=True, timeout=60, check=False)
        assert bad.returncode != 0
        assert missing in bad.stderr
