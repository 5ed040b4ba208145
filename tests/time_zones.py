"""Runs the tests of what depends on time under two time zones: a `conftest.py` that imports both names has it for its folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

ZONES = ("UTC", "Asia/Kolkata")
"""The second is ahead by a fraction of an hour: a local time where epoch milliseconds are meant shows in hours and in minutes."""
TIMED: dict[str, tuple[str, ...]] = {
    "tests.streams.test_contracts": (),
    "tests.streams.test_features": (),
    "tests.streams.test_rows": (),
    "tests.streams.test_store_embeddings": (),
    "tests.streams.test_store_lookup": (),
    "tests.streams.test_time_zones": (),
    "tests.streams.test_tools": (),
    "tests.streams.test_user_log": (),
    "tests.solaris.test_worker": (
        "test_order_and_repetition_of_records_do_not_matter",
        "test_a_slate_that_its_events_overtook_is_computed",
    ),
}
"""By module, the tests concerned; all of them where none is named. A test may also ask for `time_zone` itself, with `indirect=True`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = TIMED.get(metafunc.module.__name__)
    if chosen is not None and (not chosen or metafunc.function.__name__ in chosen):
        metafunc.fixturenames.insert(0, "time_zone")
        metafunc.parametrize("time_zone", ZONES, indirect=True)


@pytest.fixture
def time_zone(request: pytest.FixtureRequest) -> Iterator[str]:
    """The zone of this process and of those that it starts, until the test ends."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = request.param
    time.tzset()
    try:
        yield request.param
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()
