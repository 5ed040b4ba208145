"""Times the operators against their references and against the GEMM peak of the same run.

`python -m benchmarks.kernels [--quick]`: on a CPU the CPU forms, on a machine with a GPU the Triton kernels. It first
compares every operator with its reference, forward and backward, and refuses to time anything while one is off. Rows
are appended to benchmarks/results/kernels.csv; the last printed line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.workloads import SHAPES, TINY, Shape, Workload, workloads
from kernels.testing import assert_as_good, value_and_gradients

Row = dict[str, object]
RESULT = Path(__file__).parents[1] / "results" / "kernels.csv"
FIELDS = [
    *("date", "commit", "device", "threads", "dtype", "shape", "operator", "backend", "direction"),
    *("gflop", "mbyte", "p20_ms", "p50_ms", "p80_ms", "gflop_s", "share_of_gemm_peak", "rounds"),
]
GEMM_SIZE = {"cpu": 1024, "cuda": 8192}


def check(dtype: torch.dtype, device: str) -> None:
    """Exit unless every operator is as good as its reference in the same dtype, up to the usual factor of 2."""
    for work in workloads(TINY, dtype, device):
        assert work.reference is not None
        exact = value_and_gradients(work.reference, *(x.double() for x in work.inputs))
        plain = value_and_gradients(work.reference, *work.inputs)
        floor = 4 * float(torch.finfo(dtype).eps)
        try:
            assert_as_good(value_and_gradients(work.run, *work.inputs), plain, exact, floor=floor)
        except AssertionError as error:
            sys.exit(f"correctness check is red, nothing is timed: {work.operator}: {error}")


def timed_ms(function: Callable[[], object], device: str) -> float:
    """Wall time of one call in milliseconds, the device's queue drained before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def forward_of(work: Workload, function: Callable[..., Tensor]) -> Callable[[], object]:
    """The forward pass alone."""

    def call() -> object:
        with torch.no_grad():
            return function(*work.inputs)

    return call


def both_of(work: Workload, function: Callable[..., Tensor]) -> Callable[[], object]:
    """Forward and backward."""
    leaves = [x.detach().requires_grad_() for x in work.inputs]
    cotangent = torch.ones_like(function(*work.inputs))
    return lambda: torch.autograd.grad(function(*leaves), leaves, cotangent)


def gemm_of(dtype: torch.dtype, device: str) -> tuple[Callable[[], object], float]:
    """A large square matrix product in this dtype, and its operations."""
    size = GEMM_SIZE[device]
    a, b = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    return lambda: a @ b, 2.0 * size**3


def measure(shape: Shape, dtype: torch.dtype, device: str, rounds: int, with_reference: bool) -> list[Row]:
    """Rows for one shape; everything compared runs interleaved, round by round, with the GEMM among it."""
    gemm, gemm_flops = gemm_of(dtype, device)
    backend = "triton" if device == "cuda" else "cpu"
    calls: dict[tuple[str, str, str], Callable[[], object]] = {}
    works = {work.operator: work for work in workloads(shape, dtype, device)}
    for work in works.values():
        for direction, wrap in (("forward", forward_of), ("both", both_of)):
            calls[work.operator, backend, direction] = wrap(work, work.run)
            if with_reference and work.reference is not None:
                calls[work.operator, "reference", direction] = wrap(work, work.reference)
    for call in [gemm, *calls.values()]:
        call()  # warm up, and compile
    times: dict[tuple[str, str, str], list[float]] = {key: [] for key in calls}
    peaks: list[float] = []
    for _ in range(rounds):
        peaks.append(gemm_flops / timed_ms(gemm, device) / 1e6)
        for key, call in calls.items():
            times[key].append(timed_ms(call, device))
    peak_gflop_s = statistics.median(peaks)
    rows: list[Row] = [
        {"operator": "gemm", "backend": "torch", "direction": "forward", "gflop_s": round(peak_gflop_s, 1)}
    ]
    for (operator, name, direction), spent in times.items():
        cost = works[operator].cost
        flops = cost.flops if direction == "forward" else cost.flops + cost.backward_flops
        p20, p50, p80 = (float(torch.tensor(spent).quantile(q)) for q in (0.2, 0.5, 0.8))
        rows.append(
            {
                "operator": operator,
                "backend": name,
                "direction": direction,
                "gflop": round(flops / 1e9, 4),
                "mbyte": round(cost.num_bytes / 1e6, 3) if direction == "forward" else "",
                "p20_ms": round(p20, 3),
                "p50_ms": round(p50, 3),
                "p80_ms": round(p80, 3),
                "gflop_s": round(flops / p50 / 1e6, 1),
                "share_of_gemm_peak": round(flops / p50 / 1e6 / peak_gflop_s, 3),
            }
        )
    return rows


def append(rows: list[Row]) -> None:
    """Add rows to the table of results."""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    fresh = not RESULT.exists()
    with RESULT.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def commit() -> str:
    """Short id of the checked-out commit, `unknown` outside a repository."""
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def main() -> None:
    """Check, measure, append, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, one dtype, five rounds")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = [torch.bfloat16, torch.float32] if device == "cuda" else [torch.float32, torch.bfloat16]
    if args.quick:
        dtypes = dtypes[:1]
    rounds = 5 if args.quick else 15
    common: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": args.threads,
        "rounds": rounds,
    }
    table: list[Row] = []
    for dtype in dtypes:
        check(dtype, device)
        for shape in SHAPES[device][: 1 if args.quick else None]:
            for row in measure(shape, dtype, device, rounds, with_reference=shape is SHAPES[device][0]):
                table.append({**common, "dtype": str(dtype).removeprefix("torch."), "shape": shape.name, **row})
    append(table)
    columns = f"{'operator':26}{'shape':8}{'dtype':10}{'backend':11}{'direction':10}"
    print(f"{columns}{'p50 ms':>10}{'GFLOP/s':>10}{'of peak':>9}")
    for r in table:
        p50, share = r.get("p50_ms", ""), r.get("share_of_gemm_peak", "")
        print(
            f"{r['operator']:26}{r['shape']:8}{r['dtype']:10}{r['backend']:11}{r['direction']:10}"
            f"{p50:>10}{r['gflop_s']:>10}{share:>9}"
        )
    print(json.dumps(headline(table)))


def headline(table: list[Row]) -> dict[str, object]:
    """Share of the GEMM peak per operator, and how many times faster than the reference it is."""
    first = [r for r in table if (r["dtype"], r["shape"]) == (table[0]["dtype"], table[0]["shape"])]
    spent = {(r["operator"], r["backend"], r["direction"]): r for r in first}
    result: dict[str, object] = {"benchmark": "kernels", "device": table[0]["device"], "dtype": table[0]["dtype"]}
    result["gemm_peak_gflop_s"] = table[0]["gflop_s"]
    for (operator, backend, direction), row in spent.items():
        if backend in ("cpu", "triton") and direction == "both":
            reference = spent[operator, "reference", "both"]
            result[str(operator)] = {
                "share_of_gemm_peak": row["share_of_gemm_peak"],
                "times_reference": round(float(str(reference["p50_ms"])) / float(str(row["p50_ms"])), 2),
            }
    return result


if __name__ == "__main__":
    main()
