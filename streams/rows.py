"""One event of a user's log as a packed row, and the order of rows.

A user's log is ordered by ``(time_ms, event_id)``. The event id stands first in the row and is big-endian, so that a
server which breaks ties of time by comparing bytes (a sorted set does) breaks them by event id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LOG_ROW = np.dtype(
    [("event_id", ">u8"), ("time_ms", "<i8"), ("ad", "<u8"), ("value", "<f4"), ("actions", "<u2"), ("surface", "u1")]
)
"""A packed row of 31 bytes: ``actions`` is a bit mask of event types, ``value`` a float that the schema names."""

MAX_TIME_MS = 2**53 - 1
"""Largest time, either side of the epoch, that a sorted set's score (a double) holds exactly."""

RowArray = npt.NDArray[np.void]
"""A one-dimensional array of ``LOG_ROW``."""


def user_key(user: int, kind: str) -> str:
    """Name a user's value of one kind; the braces put all of a user's keys into one hash slot.

    Args:
        user: The user id, 0 .. 2^64 - 1.
        kind: What the value is, such as ``"log"`` or ``"pairs"``.

    Returns:
        ``{u:<user as 16 hex digits>}:<kind>``.
    """
    return f"{{u:{int(user):016x}}}:{kind}"


def byte_keys(array: npt.NDArray[np.generic]) -> npt.NDArray[np.bytes_]:
    """View every row of an array as one byte string, to compare rows by their bytes.

    Args:
        array: Contiguous [n] or [n, width] array of fixed-size items.

    Returns:
        [n] byte strings without copying. Equal strings are equal bytes, and the order is that of ``memcmp``.
    """
    width = array.dtype.itemsize * (array.shape[1] if array.ndim == 2 else 1)
    return np.ascontiguousarray(array).view(f"S{width}").reshape(len(array))


def as_log_rows(rows: npt.NDArray[np.void]) -> RowArray:
    """Bring rows to the byte order of ``LOG_ROW``; ``np.concatenate`` and its kin silently change it to the machine's.

    Args:
        rows: [n] rows.

    Returns:
        [n] contiguous ``LOG_ROW``; a copy only where needed.

    Raises:
        ValueError: The rows have other fields, or more than one dimension.
    """
    if not np.can_cast(rows.dtype, LOG_ROW, "equiv") or rows.dtype.names != LOG_ROW.names:
        raise ValueError(f"rows have dtype {rows.dtype}, expected LOG_ROW {LOG_ROW}")
    if rows.ndim != 1:
        raise ValueError(f"rows have shape {rows.shape}, expected one dimension")
    return np.ascontiguousarray(rows, dtype=LOG_ROW)


def row_order(rows: RowArray, users: npt.NDArray[np.uint64] | None = None) -> npt.NDArray[np.int64]:
    """Find the order of rows by (user, time, event id), and then by their bytes, as the server does.

    Args:
        rows: [n] rows.
        users: [n] users, or None where all rows are of one user.

    Returns:
        [n] indices.
    """
    keys = [rows["event_id"].astype(np.uint64), rows["time_ms"]] + ([] if users is None else [users])
    order = np.lexsort(keys)
    tied = np.logical_and.reduce([key[order[1:]] == key[order[:-1]] for key in keys])
    if tied.any():  # comparing bytes is slow, and only an event id that was given twice asks for it
        order = np.lexsort([byte_keys(rows), *keys])
    return order.astype(np.int64, copy=False)


def sort_rows(rows: RowArray) -> RowArray:
    """Sort the rows of one user by (time_ms, event_id).

    Args:
        rows: [n] rows in any order.

    Returns:
        [n] rows, a copy.

    Raises:
        ValueError: The rows are no ``LOG_ROW``.
    """
    rows = as_log_rows(rows)
    return rows[row_order(rows)]


def dedupe(rows: RowArray) -> RowArray:
    """Sort the rows of one user and keep one of each; two rows are the same if all their bytes are.

    Args:
        rows: [n] rows in any order.

    Returns:
        [m <= n] rows in the order of the log, a copy.

    Raises:
        ValueError: The rows are no ``LOG_ROW``.
    """
    ordered = sort_rows(rows)
    return ordered[first_of_run(byte_keys(ordered))]


def first_of_run(*columns: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Mark the first row of every run of equal rows.

    Args:
        columns: [n] arrays; a row equals the one before it if it does in every column.

    Returns:
        [n] mask.
    """
    first = np.zeros(len(columns[0]), dtype=bool)
    first[:1] = True
    for column in columns:
        first[1:] |= column[1:] != column[:-1]
    return first


def check_rows(users: npt.NDArray[np.uint64], rows: RowArray) -> RowArray:
    """Refuse rows that a log could not keep in order.

    Args:
        users: [n] users.
        rows: [n] rows.

    Returns:
        [n] rows as ``LOG_ROW``.

    Raises:
        ValueError: The lengths or the dtype do not fit, or a time is beyond what a score holds exactly.
    """
    rows = as_log_rows(rows)
    if users.shape != rows.shape:
        raise ValueError(f"users {users.shape} and rows {rows.shape} must be one-dimensional and of one length")
    outside = np.flatnonzero((rows["time_ms"] > MAX_TIME_MS) | (rows["time_ms"] < -MAX_TIME_MS))
    if len(outside):
        at = outside[0]
        event_id, time_ms = rows["event_id"][at], rows["time_ms"][at]
        raise ValueError(f"row {at} (event {event_id}): time_ms {time_ms} is beyond ±{MAX_TIME_MS}")
    return rows
