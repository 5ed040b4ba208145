"""Jobs of a person at the console: produce events, replay a log, inspect topics and users."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import polars as pl
import redis

from streams.codec import CodecError, codec_of
from streams.dataset import Dataset
from streams.errors import UserError
from streams.events import ACTIVITY_TOPIC, ActivityEvent, EventError, decode_event, encode_event, event_row
from streams.features import PAIRS, SLATE, USER
from streams.ids import ExternalId, id64
from streams.log import REJECTED_SUFFIX, ActivityLog
from streams.requests import SERVED_TOPIC
from streams.rows import user_key
from streams.schema import FeatureSchema
from streams.user_log import UserLog

CHUNK = 1_000
SHOWN_REFUSALS = 5
SHOWN_EVENTS = 20
SHOWN_ERRORS = 5


@dataclass
class Produced:
    """What `produce` did: events published, lines refused, and the first refusals as `line: reason`."""

    published: int = 0
    refused: int = 0
    reasons: list[str] = field(default_factory=list)


def produce(log: ActivityLog, lines: Iterable[bytes], schema: FeatureSchema) -> Produced:
    """Publishes lines as activity events; a line that is no legal event is refused and counted, and the rest goes on.

    Raises:
        LogUnavailable: the broker cannot be reached; what was published before stays.
    """
    result = Produced()
    chunk: list[tuple[str, bytes]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = decode_event(line)
            user, _ = event_row(event, schema)
        except EventError as error:
            result.refused += 1
            if len(result.reasons) < SHOWN_REFUSALS:
                result.reasons.append(f"line {number}: {error}")
            continue
        chunk.append((f"{user:016x}", encode_event(event)))
        if len(chunk) == CHUNK:
            log.publish_many(ACTIVITY_TOPIC, chunk)
            result.published += len(chunk)
            chunk = []
    log.publish_many(ACTIVITY_TOPIC, chunk)
    result.published += len(chunk)
    return result


@contextmanager
def lines_of(source: str) -> Iterator[Iterable[bytes]]:
    """The lines of a file, or of standard input for `-`; of a Parquet file each row as a line, its columns the fields of `ActivityEvent`.

    Raises:
        UserError: a Parquet file cannot be read.
        FileNotFoundError: naming the file.
    """
    if source == "-":
        yield sys.stdin.buffer
        return
    with open(source, "rb") as file:
        yield _rows_as_lines(source) if source.endswith(".parquet") else file


def _rows_as_lines(path: str) -> Iterator[bytes]:
    try:
        frame = pl.read_parquet(path)
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{path} is no Parquet file that can be read: {error}") from error
    for row in frame.iter_rows(named=True):
        # An empty cell is an absent field; what is then missing or ill-typed is refused like in any other line.
        yield msgspec.json.encode({name: value for name, value in row.items() if value is not None}, enc_hook=str)


def events_of(dataset: Dataset, start_ms: int | None = None, end_ms: int | None = None) -> Iterator[ActivityEvent]:
    """The events of a dataset in [start, end), in order of time, as a producer would publish them."""
    times = dataset.rows["time_ms"]
    low = 0 if start_ms is None else int(np.searchsorted(times, start_ms))
    high = len(times) if end_ms is None else int(np.searchsorted(times, end_ms))
    for index in range(low, high):
        yield event_of(dataset, index)


def event_of(dataset: Dataset, index: int) -> ActivityEvent:
    """The activity event of one impression of a dataset."""
    row = dataset.rows[index]
    mask = int(row["actions"])
    return ActivityEvent(
        event_id=index,
        user_id=int(dataset.raw_users[index]),
        ad_id=dataset.raw_ads[int(row["ad"])],
        surface=dataset.schema.surfaces[int(row["surface"])],
        time_ms=int(row["time_ms"]),
        event_types=[name for bit, name in enumerate(dataset.schema.event_types) if mask >> bit & 1],
        value=float(row["value"]),
    )


def replay(log: ActivityLog, events: Iterable[ActivityEvent], speed: float | None) -> int:
    """Publishes events in order of time.

    Args:
        log: where to.
        events: in order of time.
        speed: event seconds per second; None publishes as fast as the log takes them.

    Returns:
        how many.

    Raises:
        UserError: the speed is not positive.
        LogUnavailable: the broker cannot be reached.
    """
    if speed is not None and speed <= 0:
        raise UserError(f"speed must be positive, found {speed}")
    count, first_ms, start = 0, None, time.monotonic()
    chunk: list[tuple[str, bytes]] = []

    def flush() -> None:
        log.publish_many(ACTIVITY_TOPIC, chunk)
        chunk.clear()

    for event in events:
        first_ms = event.time_ms if first_ms is None else first_ms
        if speed is not None:
            wait = (event.time_ms - first_ms) / 1e3 / speed - (time.monotonic() - start)
            if wait > 0:
                flush()
                time.sleep(wait)
        chunk.append((f"{id64(event.user_id):016x}", encode_event(event)))
        if len(chunk) == CHUNK:
            flush()
        count += 1
    flush()
    return count


def inspect_topics(log: ActivityLog, group: str) -> dict[str, dict[str, Any]]:
    """{topic: published, lag of the group, rejected, and the newest rejections with their reasons}.

    Raises:
        LogUnavailable: the broker cannot be reached.
    """
    return {
        topic: {
            "published": log.published(topic),
            "lag": log.lag(topic, group),
            "rejected": log.published(topic + REJECTED_SUFFIX),
            "last_errors": _last_errors(log, topic + REJECTED_SUFFIX),
        }
        for topic in (SERVED_TOPIC, ACTIVITY_TOPIC)
    }


def _last_errors(log: ActivityLog, topic: str) -> list[dict[str, Any]]:
    """When, whose and why; newest first."""
    found = []
    for record in log.newest(topic, SHOWN_ERRORS):
        try:
            message = msgspec.json.decode(record.value, type=dict[str, Any])
            found.append({"time_ms": int(message["time_ms"]), "key": message["key"], "reason": str(message["reason"])})
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            found.append({"time_ms": 0, "key": record.key, "reason": "a record of another form"})
    return sorted(found, key=lambda error: error["time_ms"], reverse=True)[:SHOWN_ERRORS]


def inspect_user(client: redis.Redis, user: ExternalId, schema: FeatureSchema) -> dict[str, Any]:
    """What the store knows of a user: his newest events, and of each kind of rows how many there are, of which states and FM versions.

    Raises:
        redis.RedisError: the store cannot be reached.
        ValueError: the id is not legal.
    """
    identity = id64(user)
    rows = UserLog(client).history(identity, 2**53, SHOWN_EVENTS)
    stored: dict[str, Any] = {}
    for kind in (PAIRS, USER, SLATE):
        value: Any = client.get(user_key(identity, kind))
        stored[kind] = None if value is None else _described(value)
    surfaces = dict(enumerate(schema.surfaces))
    return {
        "user": f"{identity:016x}",
        "events": int(client.zcard(user_key(identity, "log"))),  # type: ignore[arg-type]
        "event_types": dict(Counter(name for row in rows for name in _types(row, schema))),
        "newest": [
            {
                "time_ms": int(row["time_ms"]),
                "ad": f"{int(row['ad']):016x}",
                "surface": surfaces.get(int(row["surface"]), "before the log"),
                "event_types": _types(row, schema),
            }
            for row in rows[::-1]
        ],
        "rows": stored,
    }


def _described(value: bytes) -> dict[str, Any]:
    """A stored value of any width."""
    try:
        block = codec_of(value).unpack(value)
    except CodecError as error:
        return {"bytes": len(value), "unreadable": str(error)}
    return {
        "bytes": len(value),
        "rows": len(block.ads),
        "newest_state_ms": int(block.state_ms.max(initial=0)),
        "oldest_state_ms": int(block.state_ms.min(initial=2**62)) if len(block.ads) else 0,
        "versions": {f"{version:016x}": count for version, count in Counter(block.versions.tolist()).items()},
    }


def _types(row: Any, schema: FeatureSchema) -> list[str]:
    return [name for bit, name in enumerate(schema.event_types) if int(row["actions"]) >> bit & 1]
