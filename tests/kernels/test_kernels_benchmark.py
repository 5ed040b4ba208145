"""The benchmark refuses to time wrong operators, and knows every operator's cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import __main__ as benchmark
from benchmarks.kernels import workloads

ROOT = Path(__file__).parents[2]


def test_nothing_is_timed_while_an_operator_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.check(torch.float32, "cpu")

    def slightly_wrong(*args: object) -> list[workloads.Workload]:
        works = workloads.workloads(workloads.TINY, torch.float32, "cpu")
        right = works[3].run
        works[3] = dataclasses.replace(works[3], run=lambda *x: right(*x) * 1.001)
        return works

    monkeypatch.setattr(benchmark, "workloads", slightly_wrong)
    with pytest.raises(SystemExit, match="correctness check is red, nothing is timed: gdpa: result 0"):
        benchmark.check(torch.float32, "cpu")


def test_every_operator_is_timed() -> None:
    works = workloads.workloads(workloads.TINY, torch.float32, "cpu")
    operators = {p.parent.name for p in (ROOT / "kernels").glob("*/reference.py")} - {"quantize"}
    assert operators <= {w.operator for w in works}
    assert all(w.cost.flops > 0 and w.cost.num_bytes > 0 for w in works)
