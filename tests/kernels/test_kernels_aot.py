"""Every Triton kernel compiles for the GPU kinds we support, on a machine without one."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
LIMIT_S = 900  # a cold run takes about a minute; this bounds a hang on a busy machine
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


def kernels_in_source() -> set[str]:
    """Names of the functions that are launched: decorated, and indexed with a grid somewhere in their module."""
    names = set()
    for path in (ROOT / "kernels").glob("*/triton*.py"):
        text = path.read_text()
        module = ".".join(path.relative_to(ROOT / "kernels").with_suffix("").parts)
        defined = re.findall(r"@triton\.jit\ndef (\w+)\(", text)
        names |= {f"{module}.{name}" for name in defined if re.search(rf"\b{name}\[", text)}
    return names


def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    table = tmp_path / "aot.csv"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels.aot", "--quick", "--out", str(table)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 0, run.stdout + run.stderr
    with table.open() as file:
        records = list(csv.DictReader(file))
    expected = kernels_in_source()
    assert len(expected) >= 15
    for target, limit in SHARED_LIMIT.items():
        compiled = {r["kernel"] for r in records if r["target"] == target}
        # GPUs before compute capability 8.9 have no FP8 type.
        wanted = {k for k in expected if target != "sm_80" or not k.startswith("quantize.")}
        assert compiled == wanted
        assert max(int(r["shared_bytes"]) for r in records if r["target"] == target) <= limit
