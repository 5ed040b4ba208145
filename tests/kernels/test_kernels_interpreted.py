"""Runs the tests of `interpreted/` in processes of their own, where triton starts in interpreter mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
LIMIT_S = 900  # a run takes about a minute; this bounds a hang on a busy machine


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", f"--confcutdir={path.parents[1]}"]
    command = [sys.executable, "-m", "pytest", str(path), *options]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
