"""Results of benchmarks as CSV files, one per benchmark, to which each run appends."""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


def append_rows(name: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Appends rows of equal columns to `<name>.csv`, with date, commit and device."""
    if not rows:
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "device": f"cpu {platform.machine()}",
    }
    path = FOLDER / f"{name}.csv"
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*about, *rows[0]])
        if new:
            writer.writeheader()
        writer.writerows(
            about | {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows
        )
