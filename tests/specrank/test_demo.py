"""The demo's own path, small: real processes, the mini log, a handful of users."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specrank.demo.config import DemoConfig
from specrank.demo.run import run_demo
from streams.levels import Level
from tests.system import GEM

ROOT = Path(__file__).parent.parent.parent
MINI = ROOT / "data" / "kuairand" / "mini"
LEVELS = {level.label for level in Level}


def test_the_demo_reports_what_it_promises(tmp_path: Path) -> None:
    run = tmp_path / "run"
    report = run_demo(DemoConfig(data=MINI, run=run, user_share=0.06, candidates=40, gem=GEM))
    assert json.loads((run / "report.json").read_text()).keys() == report.keys()
    assert (run / "report.png").stat().st_size > 10_000
    assert report["fm_calls_on_path"] == 0
    for name in ("coverage", "coverage_shown"):
        assert set(report[name]) == LEVELS
        assert sum(report[name].values()) == pytest.approx(1.0, abs=1e-3)
    assert report["coverage"]["pair_fresh"] > 0.05, "Solaris must have been at work"
    assert 0 < report["latency_ms"]["p50"] <= report["latency_ms"]["p99"]
    for side in ("gem", "served_with", "served_without"):
        assert set(report[side]) == {"is_click", "long_view", "is_like"}
        assert {"auc", "gauc", "ne", "n"} <= set(report[side]["is_click"])
        assert report[side]["is_click"]["gauc"] is not None
    assert report["served_with"]["is_click"]["n"] == report["served_without"]["is_click"]["n"] > 100
    assert report["served_with"]["is_click"]["auc"] != report["served_without"]["is_click"]["auc"]
    assert set(report["seconds"]) >= {"load", "gem", "rankers", "replay", "total"}


def specrank(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specrank", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["demo", "--data", "nowhere"], {}, "data folder nowhere does not exist"),
        (["downstream", "serve"], {}, "rankers: Field required; redis_url: Field required"),
        (
            ["downstream", "serve"],
            {"SPECRANK_API_RANKERS": "nowhere", "SPECRANK_API_REDIS_URL": "redis://127.0.0.1:1/0"},
            "folder of rankers nowhere does not exist",
        ),
        (
            ["solaris", "run"],
            {
                "SPECRANK_WORKER_GEM": "nowhere",
                "SPECRANK_WORKER_AUTOENCODER": "x",
                "SPECRANK_WORKER_REDIS_URL": "redis://127.0.0.1:1/0",
            },
            "nowhere is no gem model: manifest.json is missing",
        ),
    ],
)
def test_mistakes_are_one_clear_line(arguments: list[str], environment: dict[str, str], named: str) -> None:
    result = specrank(*arguments, **environment)
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert named in lines[0]
    assert lines[0].startswith("specrank: ")


def test_every_command_explains_itself() -> None:
    text = specrank("--help").stdout
    for command in ("demo", "gem", "loopfm", "solaris", "downstream"):
        assert command in text


def test_a_folder_that_no_demo_made_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("keep")
    result = specrank("demo", "--data", str(MINI), "--run", str(tmp_path))
    assert result.returncode != 0
    assert "is not empty and not of an earlier demo" in result.stderr
    assert (tmp_path / "precious.txt").read_text() == "keep"
