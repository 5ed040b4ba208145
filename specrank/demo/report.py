"""The demo's report: report.json, one plot, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from gem.examples import RequestLog
from gem.metrics import evaluate
from specrank.demo.replay import Replayed
from streams.levels import Level

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - the backend is chosen first

HOUR_MS = 3_600_000
COLOURS = ("#d0d0d0", "#9ecae1", "#6baed6", "#fdae6b", "#31a354")


def coverage(counts: NDArray[np.integer]) -> dict[str, float]:
    """{level: share} of counts per level."""
    total = max(int(counts.sum()), 1)
    return {level.label: round(float(counts[level] / total), 4) for level in reversed(Level)}


def served_metrics(
    log: RequestLog,
    replayed: Replayed,
    probabilities: NDArray[np.float32],
    frozen: NDArray[np.float32],
    base: NDArray[np.float32],
) -> dict[str, dict[str, Any]]:
    """Metrics per objective of the served scores of shown ads; gAUC from predictions with everything frozen at the split."""
    at, local = log.candidate_indices(replayed.requests)
    users = log.users[replayed.requests][local]
    return {
        name: evaluate(
            log.labels[at, k], probabilities[:, k], float(base[k]), groups=users, frozen_probabilities=frozen[:, k]
        ).to_dict()
        for k, name in enumerate(log.encoder.schema.objectives)
    }


def percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    """{p50, p99}."""
    return {f"p{p}": round(float(np.percentile(values, p)), 2) for p in (50, 99)}


def plot(path: Path, log: RequestLog, replayed: Replayed) -> None:
    """Coverage by level over event time, and latency beside it."""
    hours = (log.times_ms[replayed.requests] - log.times_ms[replayed.requests[0]]) // HOUR_MS
    counts = np.zeros((int(hours.max()) + 1, len(Level)))
    np.add.at(counts, hours, replayed.level_counts)
    total = counts.sum(1)
    share = counts[total > 0] / total[total > 0, None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=(2.2, 1))
    labels = [level.label.replace("_", " ") for level in reversed(Level)]
    left.stackplot(np.flatnonzero(total > 0), share.T[::-1], labels=labels, colors=COLOURS[::-1])
    left.set(
        xlabel="hours since the replay began (event time)",
        ylabel="share of candidates",
        ylim=(0, 1),
        title="embedding level read by the ranker",
    )
    left.margins(x=0)
    left.legend(loc="lower right", fontsize=8, framealpha=0.9)
    latency = np.sort(replayed.latency_ms)
    right.plot(latency, np.linspace(0, 1, len(latency)), color="#31a354", label="HTTP round trip")
    right.plot(
        np.sort(replayed.server_ms), np.linspace(0, 1, len(latency)), color="#3182bd", label="inside the service"
    )
    right.set(
        xlabel="ms",
        ylabel="share of requests",
        xlim=(0, float(np.percentile(latency, 99.5))),
        ylim=(0, 1),
        title="latency",
    )
    right.legend(loc="lower right", fontsize=8)
    right.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(path: Path, report: dict[str, Any]) -> None:
    """Writes report.json."""
    path.write_text(json.dumps(report, indent=2, default=float) + "\n")


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the report."""
    quality = Table(title="Quality on the test days (AUC up, NE down is better)", title_justify="left")
    for column in (
        "objective",
        "FM AUC",
        "FM NE",
        "served, Solaris AUC",
        "NE",
        "served, without AUC",
        "NE",
        "shown ads",
    ):
        quality.add_column(column, justify="left" if column == "objective" else "right")
    for name, fm in report["gem"].items():
        cells = [name]
        for metrics in (fm, report["served_with"][name], report["served_without"][name]):
            cells += [f"{metrics['auc']:.4f}" if metrics["auc"] is not None else "-", f"{metrics['ne']:.4f}"]
        quality.add_row(*cells, f"{report['served_with'][name]['n']:,}")
    console.print(quality)
    levels = Table(title="What the ranker read", title_justify="left")
    for column in ("level", "candidates", "shown ads"):
        levels.add_column(column, justify="left" if column == "level" else "right")
    for level, share in report["coverage"].items():
        levels.add_row(level, f"{share:.1%}", f"{report['coverage_shown'][level]:.1%}")
    console.print(levels)
    latency, server = report["latency_ms"], report["server_ms"]
    replay = report["replay"]
    console.print(
        f"{replay['requests']:,} requests of {replay['candidates']} candidates; HTTP round trip p50 {latency['p50']} ms, "
        f"p99 {latency['p99']} ms (inside the service {server['p50']} / {server['p99']}); "
        f"FM calls on the critical path: {report['fm_calls_on_path']}"
    )
    console.print("seconds: " + ", ".join(f"{stage} {value:.0f}" for stage, value in report["seconds"].items()))
