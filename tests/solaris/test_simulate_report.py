"""Tables of the speculation benchmark: the newest rows, and values between budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speculation.report import curve_at, latest, markdown

HEADER = "trace,ttl_h,budget,policy,coverage,gap_closed,useful_share,hierarchy_flops_share,shown_coverage,ne_kept\n"


def test_the_newest_row_of_each_policy_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        HEADER
        + "a,24.0,0.1,p,0.1,,0.5,0.2,0.3,0.4\na,24.0,0.1,q,0.2,1,0.5,0.2,0.3,0.4\na,24.0,0.1,p,0.3,0.25,,0.2,0.3,0.4\n"
    )
    rows = latest(path)
    assert [(r["policy"], r["coverage"], r["gap_closed"], r["useful_share"]) for r in rows] == [
        ("q", 0.2, 1.0, 0.5),
        ("p", 0.3, 0.25, None),
    ]
    assert "| p | .300 / .250 / – |" in markdown(rows)


def test_a_curve_is_read_between_budgets_and_not_before_the_first() -> None:
    rows = [
        {"policy": "p", "hierarchy_flops_share": x, "flops_share": x / 2, "ne_kept": y, "coverage": y}
        for x, y in ((0.2, 0.4), (0.4, 0.6))
    ]
    assert curve_at(rows, "p", "ne_kept", 0.25) == pytest.approx(0.45)
    assert curve_at(rows, "p", "coverage", 0.15) == pytest.approx(0.5)
    assert curve_at(rows, "p", "ne_kept", 0.1) is None
    assert curve_at(rows, "p", "ne_kept", 0.9) == 0.6
