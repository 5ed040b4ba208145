"""Tables, rows and plots of the speculation benchmark."""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, object]
RESULT = Path(__file__).parents[1] / "results" / "speculation.csv"
PLOTS = Path("runs/speculation")
COLUMNS = (
    *(
        "policy",
        "coverage",
        "coverage_low",
        "coverage_high",
        "gap_closed",
        "gap_closed_exact",
        "shown_coverage",
        "useful_share",
    ),
    *("yield", "spend", "age_p50_h", "age_p95_h", "flops_share", "hierarchy_flops_share", "ne_kept"),
)


def print_table(rows: Sequence[Row]) -> None:
    """One line per policy."""
    first = rows[0]
    print(
        f"\n{first['trace']}, TTL {first['ttl_h']:.0f} h, budget {first['budget']} FM pair inferences per requested pair"
    )
    print(
        f"{COLUMNS[0]:18s}"
        + "".join(
            f"{name.replace('hierarchy_', 'h_').replace('coverage_', 'H_').replace('_share', ''):>17s}"
            for name in COLUMNS[1:]
        )
    )
    for row in sorted(rows, key=lambda r: _number(r["coverage"])):
        print(f"{row['policy']!s:18s}" + "".join(f"{_text(row[name]):>17s}" for name in COLUMNS[1:]), flush=True)


def append_csv(rows: Sequence[Row]) -> None:
    """Appends rows with date, commit and device; the columns of an older file must be the same."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "device": f"cpu {platform.machine()}",
    }
    RESULT.parent.mkdir(exist_ok=True)
    new = not RESULT.exists()
    with RESULT.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*about, *rows[0]])
        if new:
            writer.writeheader()
        writer.writerows(
            about | {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows
        )


def flops_of(measure: str) -> str:
    """The share of synchronous FLOPs that a measure is drawn against: the hierarchy runs f_R after every request."""
    return "hierarchy_flops_share" if measure == "ne_kept" else "flops_share"


def curve_at(rows: Sequence[Row], policy: str, measure: str, share: float) -> float | None:
    """A measure of a policy at a share of the synchronous FLOPs, between its budgets; None where no two budgets enclose it."""
    points = sorted((_number(r[flops_of(measure)]), _number(r[measure])) for r in rows if r["policy"] == policy)
    x, y = np.array(points).T if points else (np.zeros(0), np.zeros(0))
    if not len(x) or share < x[0]:
        return None
    if share > x[-1]:
        # a policy that cannot spend as much has what it has at its most
        return float(y[-1]) if len(x) > 1 else None
    return float(np.interp(share, x, y))


def plots(rows: Sequence[Row]) -> None:
    """Coverage, coverage of shown ads, NE kept (a model) and yield against the share of synchronous FLOPs, one figure per trace and TTL."""
    PLOTS.mkdir(parents=True, exist_ok=True)
    for trace, ttl_h in sorted({(str(r["trace"]), _number(r["ttl_h"])) for r in rows}):
        part = [r for r in rows if r["trace"] == trace and r["ttl_h"] == ttl_h]
        figure, axes = plt.subplots(2, 2, figsize=(12, 9))
        for axis, measure in zip(axes.flat, ("coverage", "shown_coverage", "ne_kept", "yield"), strict=True):
            for policy in dict.fromkeys(str(r["policy"]) for r in part):
                points = sorted(
                    (_number(r[flops_of(measure)]), _number(r[measure]))
                    for r in part
                    if r["policy"] == policy and r[measure] is not None
                )
                if points:
                    axis.plot(*np.array(points).T, marker="o", markersize=3, label=policy)
            axis.set_xlabel("share of synchronous FLOPs")
            axis.set_ylabel(measure)
            axis.grid(alpha=0.3)
        axes.flat[0].legend(fontsize=7)
        figure.suptitle(f"{trace}, TTL {ttl_h:.0f} h")
        figure.tight_layout()
        figure.savefig(PLOTS / f"{trace}_{ttl_h:.0f}h.png", dpi=110)
        plt.close(figure)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _text(value: object) -> str:
    return "-" if value is None else f"{_number(value):.3f}"
