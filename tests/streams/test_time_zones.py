"""The zones of `tests.time_zones` are in force, and a log is read alike in each."""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import UTC, datetime

from streams.dataset import Dataset, load_dataset
from streams.events import MAX_AHEAD_MS, time_problem, to_epoch_ms
from tests.conftest import MINI
from tests.time_zones import TIMED, ZONES

OFFSETS_S = dict(zip(ZONES, (0, 19_800), strict=True))


def test_the_zone_is_that_of_this_process_and_its_children(time_zone: str) -> None:
    offset = datetime.now().astimezone().utcoffset()
    assert offset is not None and offset.total_seconds() == OFFSETS_S[time_zone]
    code = "import time; print(-time.timezone)"
    assert int(subprocess.check_output([sys.executable, "-c", code])) == OFFSETS_S[time_zone]


def test_a_log_and_its_split_are_the_same_in_every_zone(time_zone: str, dataset: Dataset) -> None:
    again = load_dataset(MINI)
    assert again.rows.tobytes() == dataset.rows.tobytes() and again.prior_rows.tobytes() == dataset.prior_rows.tobytes()
    assert again.schema.split_ms() == dataset.schema.split_ms()


def test_now_is_a_legal_time_and_soon_is_not(time_zone: str) -> None:
    now_ms = to_epoch_ms(datetime.now(UTC))
    assert time_problem(now_ms) is None and time_problem(to_epoch_ms(datetime.now().astimezone())) is None
    assert "legal values" in str(time_problem(now_ms + MAX_AHEAD_MS + 60_000))


def test_everything_that_is_named_exists() -> None:
    for name, tests in TIMED.items():
        module = importlib.import_module(name)
        assert all(hasattr(module, test) for test in tests), name
