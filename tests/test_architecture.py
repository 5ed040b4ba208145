"""The layout is the architecture: imports only go down the floors, files fit in a head."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"kernels": 1, "streams": 2, "gem": 3, "loopfm": 4, "solaris": 5, "downstream": 5, "specrank": 6}
NEVER = {"streams": {"torch", "torchrec", "triton"}, "kernels": {"torchrec", "redis", "polars"}}
NO_SOCKETS = {"gem", "loopfm"}
SOCKETS = {"socket", "redis", "kafka", "faust", "aiokafka", "httpx", "requests", "http", "urllib", "uvicorn", "fastapi"}


def modules() -> list[Path]:
    return [path for package in FLOORS for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    names = imported(path)
    for other in names & set(FLOORS):
        assert other == package or FLOORS[other] < FLOORS[package], f"{package} may not import {other}"
    assert not names & NEVER.get(package, set())
    if package in NO_SOCKETS:
        assert not names & SOCKETS


def test_every_package_has_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages == set(FLOORS)


def test_files_fit_in_a_head() -> None:
    limits = {path: 600 if path.relative_to(ROOT).parts[0] == "kernels" else 400 for path in modules()}
    long = {
        str(path.relative_to(ROOT)): n
        for path, limit in limits.items()
        if (n := len(path.read_text().splitlines())) > limit
    }
    assert not long


def test_every_module_imports() -> None:
    for package in FLOORS:
        module = importlib.import_module(package)
        for found in pkgutil.walk_packages(module.__path__, f"{package}."):
            if (
                found.name != "specrank.__main__"
                and not found.name.endswith(".triton")
                and ".triton_" not in found.name
            ):
                importlib.import_module(found.name)


def test_the_serving_process_never_loads_the_foundation_model() -> None:
    code = "import sys, downstream.serve; sys.exit(' '.join(n for n in ('gem.engine', 'gem.model', 'torch') if n in sys.modules) or 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"the ranking API loads {result.stderr}"


def test_documents_hold_no_placeholder() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        assert "@@" not in path.read_text(), path
