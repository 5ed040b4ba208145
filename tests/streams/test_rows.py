from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.levels import Level
from streams.rows import LOG_ROW, as_log_rows, check_rows, dedupe, row_order, sort_rows, user_key

ROW = st.tuples(
    st.sampled_from([0, 1, 255, 256, 2**63, 2**64 - 1]),  # ids whose order differs between big- and little-endian
    st.integers(-2, 2),
    st.integers(0, 2),
    st.sampled_from([0.0, -0.0, float("nan"), 1.5]),
    st.integers(0, 1),
    st.integers(0, 1),
)


def rows_of(items: list[tuple[object, ...]]) -> np.ndarray:
    return np.array(items, dtype=LOG_ROW)


def log_key(row: np.void) -> tuple[int, int, bytes]:
    return int(row["time_ms"]), int(row["event_id"]), row.tobytes()


def test_a_row_is_31_bytes_with_the_event_id_first_and_big_endian() -> None:
    assert LOG_ROW.itemsize == 31
    assert rows_of([(1, 2, 3, 0.0, 4, 5)]).tobytes()[:8] == bytes(7) + b"\x01"


@given(st.lists(ROW, max_size=30))
def test_sort_and_dedupe_equal_their_definition(items: list[tuple[object, ...]]) -> None:
    rows = rows_of(items)
    expected = sorted(rows, key=log_key)
    assert sort_rows(rows).tobytes() == b"".join(row.tobytes() for row in expected)
    unique = sorted({row.tobytes(): row for row in rows}.values(), key=log_key)
    assert dedupe(rows).tobytes() == b"".join(row.tobytes() for row in unique)


def test_order_by_user_comes_first() -> None:
    rows = rows_of([(1, 5, 0, 0.0, 0, 0), (2, 1, 0, 0.0, 0, 0), (3, 0, 0, 0.0, 0, 0)])
    assert row_order(rows, np.array([1, 1, 2**64 - 1], np.uint64)).tolist() == [1, 0, 2]


def test_concatenation_changes_the_byte_order_and_is_put_right() -> None:
    rows = rows_of([(1, 2, 3, 0.5, 4, 5)])
    joined = np.concatenate([rows, rows])
    assert joined.dtype != LOG_ROW  # if numpy ever keeps it, as_log_rows may go
    assert as_log_rows(joined).tobytes() == rows.tobytes() * 2
    assert dedupe(joined).tobytes() == rows.tobytes()
    assert as_log_rows(joined[::2]).flags.c_contiguous


@pytest.mark.parametrize(
    ("users", "rows", "message"),
    [
        (np.zeros(2, np.uint64), np.zeros(1, LOG_ROW), "one length"),
        (np.zeros(1, np.uint64), np.zeros(1, np.int64), "expected LOG_ROW"),
        (np.zeros((1, 1), np.uint64), np.zeros((1, 1), LOG_ROW), "expected one dimension"),
        (np.zeros(1, np.uint64), rows_of([(7, 2**53, 0, 0.0, 0, 0)]), "event 7.*time_ms 9007199254740992"),
        (np.zeros(1, np.uint64), rows_of([(7, -(2**63), 0, 0.0, 0, 0)]), "beyond"),
    ],
)
def test_rows_that_no_log_can_order_are_refused(users: np.ndarray, rows: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(users, rows)


def test_the_largest_time_is_kept_exactly() -> None:
    rows = rows_of([(1, 2**53 - 1, 0, 0.0, 0, 0), (1, 1 - 2**53, 0, 0.0, 0, 0)])
    assert check_rows(np.zeros(2, np.uint64), rows).tobytes() == rows.tobytes()


def test_all_keys_of_a_user_have_one_tag() -> None:
    assert user_key(255, "log") == "{u:00000000000000ff}:log"
    assert user_key(np.uint64(2**64 - 1), "pairs") == "{u:ffffffffffffffff}:pairs"


def test_level_names() -> None:
    assert [level.label for level in Level] == ["none", "user", "user_aggregate", "pair_stale", "pair_fresh"]
    assert [int(level) for level in Level] == [0, 1, 2, 3, 4]
    assert all(Level.from_label(level.label) is level for level in Level)
    with pytest.raises(ValueError, match="'fresh'; legal values: none, user, user_aggregate, pair_stale, pair_fresh"):
        Level.from_label("fresh")
