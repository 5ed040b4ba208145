"""Tables, rows and plots of the speculation benchmark. `python -m benchmarks.speculation.report` prints those of docs/speculation.md."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from benchmarks.results import FOLDER

mpl.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, object]
RESULT = FOLDER / "speculation.csv"
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


def latest(path: Path = RESULT) -> list[Row]:
    """The newest row of every trace, TTL, budget and policy in a file of results; empty cells are None."""
    rows: dict[tuple[str, ...], Row] = {}
    with path.open(newline="") as file:
        for cells in csv.DictReader(file):
            key = tuple(cells[name] for name in ("trace", "ttl_h", "budget", "policy"))
            rows.pop(key, None)
            rows[key] = {name: _parsed(cell) for name, cell in cells.items()}
    return list(rows.values())


def markdown(rows: Sequence[Row]) -> str:
    """Coverage, share of the gap closed and useful share by policy and budget, one table per trace and TTL; then NE kept."""
    lines: list[str] = []
    budgets = sorted({_number(r["budget"]) for r in rows})
    policies = list(dict.fromkeys(str(r["policy"]) for r in rows))
    at = {(r["trace"], r["ttl_h"], r["budget"], r["policy"]): r for r in rows}

    def table(title: str, trace: object, ttl_h: object, columns: tuple[str, ...]) -> None:
        lines.extend(["", title, "", "| policy | " + " | ".join(_short(b) for b in budgets) + " |"])
        lines.append("|---" * (len(budgets) + 1) + "|")
        for policy in policies:
            found = [at.get((trace, ttl_h, budget, policy)) for budget in budgets]
            if any(found):
                cells = [" / ".join(_short(r[c]) for c in columns) if r else "" for r in found]
                lines.append(f"| {policy} | " + " | ".join(cells) + " |")

    for trace, ttl_h in sorted({(str(r["trace"]), _number(r["ttl_h"])) for r in rows}):
        title = f"{trace}, TTL {ttl_h:.0f} h: "
        table(title + "coverage / gap closed / useful share", trace, ttl_h, ("coverage", "gap_closed", "useful_share"))
        columns = ("hierarchy_flops_share", "shown_coverage", "ne_kept")
        table(title + "share of synchronous FLOPs / shown ads covered / NE kept", trace, ttl_h, columns)
    return "\n".join(lines)


def _parsed(cell: str) -> object:
    try:
        return float(cell)
    except ValueError:
        return cell or None


def _short(value: object) -> str:
    """.123 for 0.123."""
    return (
        "–"
        if value is None
        else f"{_number(value):.3f}".replace("0.", ".", 1)
        if abs(_number(value)) < 1
        else f"{_number(value):.2f}"
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _text(value: object) -> str:
    return "-" if value is None else f"{_number(value):.3f}"


if __name__ == "__main__":
    print(markdown(latest()))
