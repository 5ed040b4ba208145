"""The central log of user events, one ordered sequence a user: online in Valkey, offline in arrays, same answers.

Online a log is a sorted set whose score is the time and whose member is the whole row. A union of sets knows no order
and no duplicates, so events may come late, twice or in any order, from any number of writers, and the state is the
same, without a lock. An event id that a producer gives to two different events names two events.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import redis

from streams.recent import Recent
from streams.rows import LOG_ROW, RowArray, byte_keys, check_rows, first_of_run, row_order, user_key

KEPT_SIZES = 100_000
"""Users whose log's size is remembered, some 10 MB: their logs are trimmed only once they may be full."""
FOREVER_MS = 2**53
"""Above any event time, and exact as a score."""

Users = npt.NDArray[np.uint64]
Times = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.int64]

_COLUMNS: dict[str, pl.DataType] = {
    "user": pl.UInt64(),
    "event_id": pl.UInt64(),
    "time_ms": pl.Int64(),
    "ad": pl.UInt64(),
    "value": pl.Float32(),
    "actions": pl.UInt16(),
    "surface": pl.UInt8(),
}


def _check_limit(limit: int) -> None:
    if limit < 0:
        raise ValueError(f"limit is {limit}, expected 0 or more events")


class UserLog:
    """The online log: a sorted set a user, trimmed to its newest events.

    Args:
        client: A client of the server; it must not decode responses.
        max_events: How many of its newest events a user's log keeps.
    """

    def __init__(self, client: redis.Redis, *, max_events: int = 10_000) -> None:
        if max_events < 1:
            raise ValueError(f"max_events is {max_events}, expected 1 or more")
        self._client = client
        self.max_events = max_events
        self._sizes = Recent[int, int](KEPT_SIZES)

    def append(self, users: Users, rows: RowArray) -> int:
        """Add events in one round trip; those that are there already change nothing.

        Args:
            users: [n] u8.
            rows: [n] ``LOG_ROW``, in any order.

        Returns:
            How many rows were new. A row older than a full log counts, although the log drops it again.

        Raises:
            ValueError: Lengths, dtype or a time do not fit.
            redis.RedisError: The server cannot be reached; appending again is safe.
        """
        users = np.asarray(users, dtype=np.uint64)
        rows = check_rows(users, rows)
        if not len(rows):
            return 0
        order = np.argsort(users, kind="stable")
        data, size = rows[order].tobytes(), LOG_ROW.itemsize
        members = [data[at : at + size] for at in range(0, len(data), size)]
        scores = rows["time_ms"][order].tolist()
        starts = np.flatnonzero(first_of_run(users[order])).tolist()
        pipe: Any = self._client.pipeline(transaction=False)
        planned = []
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            user = int(users[order[start]])
            key = user_key(user, "log")
            pairs = [part for at in range(start, stop) for part in (scores[at], members[at])]
            pipe.execute_command("ZADD", key, *pairs)
            # A log that is half full at most, as far as we know, cannot overflow, even with another writer as busy as we are.
            size = self._sizes.get(user, self.max_events)
            trim = 2 * (size + stop - start) > self.max_events
            if trim:
                # The newest of (the newest so far and what is added) are the newest of all: trimming, too, knows no order.
                pipe.execute_command("ZREMRANGEBYRANK", key, 0, -self.max_events - 1)
                pipe.execute_command("ZCARD", key)
            planned.append((user, size, trim))
        replies = iter(pipe.execute())
        new = 0
        for user, size, trim in planned:
            added = next(replies)
            new += added
            if trim:
                next(replies)
            self._sizes[user] = next(replies) if trim else size + added
        return new

    def history(self, user: int, before_ms: int, limit: int) -> RowArray:
        """Read the newest events of a user strictly before a moment.

        Args:
            user: The user.
            before_ms: Epoch milliseconds; events at this very time are left out.
            limit: How many events at most, up to ``max_events``.

        Returns:
            [n <= limit] rows, oldest first.

        Raises:
            ValueError: The limit is negative, or greater than what the log keeps.
        """
        pipe: Any = self._client.pipeline(transaction=False)
        self.queue_history(pipe, user, before_ms, limit)
        return self.decode_history(pipe.execute()[0])

    def histories(self, users: Users, before_ms: Times, limit: int) -> tuple[RowArray, Offsets]:
        """Read the histories of many requests in one round trip.

        Args:
            users: [n] u8.
            before_ms: [n] i8, epoch milliseconds.
            limit: How many events at most for each request.

        Returns:
            All rows, and offsets i8 [n + 1]: request i has ``rows[offsets[i]:offsets[i + 1]]``, oldest first.

        Raises:
            ValueError: The lengths differ, or the limit is not legal.
        """
        pipe: Any = self._client.pipeline(transaction=False)
        for user, before in zip(users, before_ms, strict=True):
            self.queue_history(pipe, int(user), int(before), limit)
        replies = pipe.execute()
        offsets = np.zeros(len(replies) + 1, dtype=np.int64)
        np.cumsum([len(reply) for reply in replies], out=offsets[1:])
        return self.decode_history([member for reply in reversed(replies) for member in reply]), offsets

    def queue_history(self, pipe: Any, user: int, before_ms: int, limit: int) -> None:
        """Put the read of one history into a pipeline, so that it shares a round trip with other reads.

        Args:
            pipe: A pipeline of the client.
            user: The user.
            before_ms: Epoch milliseconds; events at this very time are left out.
            limit: How many events at most.

        Raises:
            ValueError: The limit is negative, or greater than what the log keeps: training would see more than serving.
        """
        _check_limit(limit)
        if limit > self.max_events:
            raise ValueError(f"limit {limit} is above max_events {self.max_events}, which is all that the log keeps")
        key, newest = user_key(user, "log"), f"({int(before_ms)}"
        pipe.execute_command("ZRANGE", key, newest, "-inf", "BYSCORE", "REV", "LIMIT", 0, limit)

    @staticmethod
    def decode_history(reply: Sequence[bytes]) -> RowArray:
        """Turn the reply to ``queue_history`` into rows.

        Args:
            reply: What the pipeline gave: members, newest first.

        Returns:
            [n] rows, oldest first, read-only.
        """
        return np.frombuffer(b"".join(reply[::-1]), dtype=LOG_ROW)


class OfflineUserLog:
    """The same log in arrays, for training: ``history`` gives what the online log would have given at that time.

    Use ``from_rows`` or ``from_parquet``.
    """

    def __init__(self, users: Users, rows: RowArray) -> None:
        """Take rows that are in order and free of duplicates; see ``from_rows``."""
        self.users, self.rows = users, rows
        first = first_of_run(users)
        self._known = users[first]
        self._starts = np.append(np.flatnonzero(first), len(users)).astype(np.int64)
        times = np.ascontiguousarray(rows["time_ms"])
        self._times = np.unique(times)
        # One sorted integer for (user, time): both as ranks, so that no span of time overflows it.
        ranks = np.cumsum(first, dtype=np.int64) - 1
        self._keys = ranks * (len(self._times) + 1) + np.searchsorted(self._times, times)

    @classmethod
    def from_rows(cls, users: Users, rows: RowArray) -> OfflineUserLog:
        """Build the log from events in any order, with or without duplicates.

        Args:
            users: [n] u8.
            rows: [n] ``LOG_ROW``.

        Raises:
            ValueError: Lengths, dtype or a time do not fit.
        """
        users = np.asarray(users, dtype=np.uint64)
        rows = check_rows(users, rows)
        order = row_order(rows, users)
        users, rows = users[order], rows[order]
        first = first_of_run(users, byte_keys(rows))
        return cls(users[first], rows[first])

    @classmethod
    def from_parquet(cls, path: str | Path) -> OfflineUserLog:
        """Read a log from Parquet with the columns user, event_id, time_ms, ad, value, actions and surface.

        Args:
            path: A file, or an address that polars can open.

        Raises:
            ValueError: A column is missing, holds nulls, or holds values that its type does not.
        """
        frame = pl.read_parquet(path)
        missing = [name for name in _COLUMNS if name not in frame.columns]
        if missing:
            raise ValueError(f"{path}: no column {', '.join(missing)}; a user log has {', '.join(_COLUMNS)}")
        rows = np.empty(len(frame), dtype=LOG_ROW)
        columns = {}
        for name, dtype in _COLUMNS.items():
            if frame[name].null_count():
                raise ValueError(f"{path}: column {name} has a null in row {frame[name].is_null().arg_max()}")
            try:
                columns[name] = frame[name].cast(dtype).to_numpy()
            except pl.exceptions.PolarsError as error:
                raise ValueError(f"{path}: column {name} ({frame[name].dtype}) is not {dtype}: {error}") from error
        for name in LOG_ROW.names or ():
            rows[name] = columns[name]
        return cls.from_rows(columns["user"], rows)

    def to_parquet(self, path: str | Path) -> None:
        """Write the log in its order.

        Args:
            path: The file to write.
        """
        data = {"user": self.users} | {
            name: self.rows[name].astype(self.rows[name].dtype.newbyteorder("=")) for name in LOG_ROW.names or ()
        }
        pl.DataFrame(data, schema=_COLUMNS).write_parquet(path)

    def history(self, user: int, before_ms: int, limit: int) -> RowArray:
        """Read the newest events of a user strictly before a moment; see ``UserLog.history``."""
        return self.histories(np.array([user], np.uint64), np.array([before_ms], np.int64), limit)[0]

    def histories(self, users: Users, before_ms: Times, limit: int) -> tuple[RowArray, Offsets]:
        """Read the histories of many requests.

        Args:
            users: [n] u8; one that the log does not know has an empty history.
            before_ms: [n] i8, epoch milliseconds.
            limit: How many events at most for each request.

        Returns:
            All rows, and offsets i8 [n + 1]: request i has ``rows[offsets[i]:offsets[i + 1]]``, oldest first.

        Raises:
            ValueError: The lengths differ, or the limit is negative.
        """
        _check_limit(limit)
        users, before_ms = np.asarray(users, dtype=np.uint64), np.asarray(before_ms, dtype=np.int64)
        if users.shape != before_ms.shape or users.ndim != 1:
            raise ValueError(f"users {users.shape} and before_ms {before_ms.shape} must have one length")
        rank = np.searchsorted(self._known, users)
        known = rank < len(self._known)
        known[known] = self._known[rank[known]] == users[known]
        rank[~known] = 0
        keys = rank * (len(self._times) + 1) + np.searchsorted(self._times, before_ms)
        stop = np.where(known, np.searchsorted(self._keys, keys), 0)
        start = np.where(known, np.maximum(self._starts[rank], stop - limit), 0)
        offsets = np.zeros(len(users) + 1, dtype=np.int64)
        np.cumsum(stop - start, out=offsets[1:])
        index = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], np.diff(offsets))
        return self.rows[index], offsets
