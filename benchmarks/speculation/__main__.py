"""Replays traces under every policy of speculation and says which has the pairs that rankers ask for, at which cost.

`python -m benchmarks.speculation [--quick]`. Tables are printed, rows appended to benchmarks/results/speculation.csv, plots written to
runs/speculation; the last printed line is one JSON object. Candidate sets of the KuaiRand trace are filled by the causal retrieval; the
generated trace is synthetic.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace

from benchmarks.results import append_rows
from benchmarks.speculation.recall import shown_against_pairs
from benchmarks.speculation.report import curve_at, plots, print_table
from benchmarks.speculation.suite import (
    FREQUENCY,
    GREEDY,
    MAIN,
    REACTIVE,
    SHOWN,
    SHOWN_KNOWN,
    VALUE,
    Comparison,
    Row,
    Shared,
    log,
)
from solaris.simulate_generate import Generator, generated_trace
from solaris.trace import DAY_MS, HOUR_MS, kuairand_trace

BUDGETS = (0.05, 0.1, 0.25, 0.5, 1.0)
TTLS_MS = (DAY_MS, HOUR_MS, 3 * DAY_MS)
BUDGET, TTL_MS = 0.1, DAY_MS
SYNCHRONOUS_SHARE = 0.25
RECALL_SIZES = (100, 300, 1_000)
BOUNDS = (SHOWN_KNOWN, GREEDY, "oracle")
QUICK_GENERATOR = Generator(num_users=300, num_candidates=40)


def run(
    shared: Shared, budgets: tuple[float, ...], ttls_ms: tuple[int, ...], only: tuple[str, ...] | None
) -> list[Row]:
    """Measures of every policy at every budget and TTL."""
    rows: list[Row] = []
    for ttl_ms in ttls_ms:
        comparison = Comparison(shared, ttl_ms, only=only)
        for budget in budgets:
            part = comparison.rows(budget)
            print_table(part)
            append_rows("speculation", part)
            rows += part
    return rows


def headline(rows: list[Row]) -> dict[str, object]:
    """What the targets of B5 ask of a trace."""
    at = {str(row["policy"]): row for row in rows if row["budget"] == BUDGET and row["ttl_h"] == TTL_MS / HOUR_MS}
    mine = at[VALUE]
    result: dict[str, object] = {
        key: mine[key]
        for key in (
            "gap_closed",
            "gap_closed_low",
            "gap_closed_high",
            "gap_closed_ranked",
            "gap_closed_exact",
            "useful_share",
        )
    }
    result["coverage"] = {name: row["coverage"] for name, row in at.items()}
    result["over_frequency"] = ratio(mine["coverage"], at[FREQUENCY]["coverage"])
    same_ttl = [row for row in rows if row["ttl_h"] == TTL_MS / HOUR_MS]
    for measure in ("ne_kept", "shown_coverage"):
        kept = {
            name: curve_at(same_ttl, name, measure, SYNCHRONOUS_SHARE)
            for name in (REACTIVE, "reactive_ranked", VALUE, SHOWN, *BOUNDS)
        }
        over = {name: ratio(value, kept[REACTIVE]) for name, value in kept.items()}
        result[f"{measure}_at_25"] = kept
        result[f"{measure}_at_25_over_reactive"] = {name: over[name] for name in (VALUE, SHOWN)}
        result[f"{measure}_at_25_bounds_over_reactive"] = {name: over[name] for name in BOUNDS}
    return result


def ratio(a: object, b: object) -> float | None:
    """Quotient; None where either is unknown or b is 0."""
    return a / b if isinstance(a, float) and isinstance(b, float) and b else None


def correctness(quick: bool) -> None:
    """The benchmark says nothing while the tests of what it runs are red."""
    names = ("simulate", "policies") if quick else ("simulate", "policies", "policy_shown", "simulate_report")
    tests = [f"tests/solaris/test_{name}.py" for name in names]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the tests of the simulator are red:\n{done.stdout[-2000:]}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one budget and TTL, the main policies, a small generated trace"
    )
    quick = parser.parse_args().quick
    began = time.time()
    correctness(quick)
    budgets, ttls = ((BUDGET,), (TTL_MS,)) if quick else (BUDGETS, TTLS_MS)
    only = MAIN if quick else None
    real = kuairand_trace()
    log(f"kuairand: {len(real)} requests, candidates filled by the causal retrieval ({time.time() - began:.0f} s)")
    foreseen_ttls = () if quick else ttls
    shared = Shared.of(real, foreseen_ttls)
    recall = shared.foreseen and shown_against_pairs(real, shared.foreseen, RECALL_SIZES)
    log(f"recall {recall} ({time.time() - began:.0f} s)")
    real_rows = run(shared, budgets, ttls, only)
    generated = generated_trace(0, QUICK_GENERATOR if quick else Generator())
    if quick:
        generated = replace(generated, name="generated_small")
    generated_rows = run(Shared.of(generated, foreseen_ttls), budgets, ttls, only)
    rows = real_rows + generated_rows
    if not quick:
        plots(rows)
    traces = {
        "kuairand": headline(real_rows) | {"shown_against_pairs": recall},
        "generated": headline(generated_rows),
        "seconds": round(time.time() - began, 1),
    }
    print(
        json.dumps(
            {
                "gap_closed": traces["kuairand"]["gap_closed"],
                "useful_share": traces["kuairand"]["useful_share"],
                "traces": traces,
            },
            default=float,
        )
    )


if __name__ == "__main__":
    main()
