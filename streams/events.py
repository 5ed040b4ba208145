"""`ActivityEvent`: one thing a user did, as producers publish it, and its row in the user log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

import msgspec
import numpy as np
from numpy.typing import NDArray

from streams.errors import UserError
from streams.ids import ExternalId, id64
from streams.rows import LOG_ROW
from streams.schema import FeatureSchema, UnknownValueError

ACTIVITY_TOPIC = "activity"
WIRE_VERSION = 1
# Outside these bounds a time is a mistake of unit (seconds, microseconds), not a moment: 2001-09-09 .. 2286-11-20.
MIN_TIME_MS, MAX_TIME_MS = 10**12, 10**13
MAX_AHEAD_MS = 60_000  # by how much a producer's clock may be ahead


class EventError(UserError, ValueError):
    """An event that cannot be accepted; the message names the field, the value and what is legal."""


class ActivityEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An impression and what followed it. JSON on the wire.

    Attributes:
        event_id: the producer's identity of the event; the same id again is the same event again and changes nothing.
        user_id: who; int or str.
        ad_id: which ad; int or str.
        surface: where it was shown; one of the schema's surfaces.
        time_ms: event time, epoch milliseconds UTC.
        event_types: what the user did; schema event types, the impression itself implied.
        value: the float that the schema names (`FeatureSchema.value`), e.g. the watched share.
        v: version of this wire format.
    """

    event_id: ExternalId
    user_id: ExternalId
    ad_id: ExternalId
    surface: str
    time_ms: int
    event_types: list[str] = []
    value: float = 0.0
    v: int = WIRE_VERSION


_decoder = msgspec.json.Decoder(ActivityEvent)
_encoder = msgspec.json.Encoder()


def encode_event(event: ActivityEvent) -> bytes:
    """The event as JSON bytes."""
    return _encoder.encode(event)


def decode_event(value: bytes) -> ActivityEvent:
    """Parses one event.

    Raises:
        EventError: not JSON, a field missing, unknown or ill-typed, or another wire version.
    """
    try:
        event = _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise EventError(f"not an activity event: {error}") from error
    if event.v != WIRE_VERSION:
        raise EventError(f"unknown wire version {event.v}; legal values: {WIRE_VERSION}")
    return event


def time_problem(time_ms: int) -> str | None:
    """What is wrong with the time of an event or a request, or None.

    One from the future would stamp a user's rows with its time, and no request before then could use them.
    """
    latest = time.time_ns() // 1_000_000 + MAX_AHEAD_MS
    if not MIN_TIME_MS <= time_ms <= min(latest, MAX_TIME_MS):
        return f"time_ms {time_ms} is not an epoch time in ms up to now; legal values: {MIN_TIME_MS} to {latest}"
    return None


def event_row(event: ActivityEvent, schema: FeatureSchema) -> tuple[int, tuple[int, int, int, float, int, int]]:
    """(user, row of `LOG_ROW`) of an event.

    Raises:
        EventError: a value outside the schema, a time that is no epoch ms, a value that is not finite.
    """
    problem = time_problem(event.time_ms)
    if problem:
        raise EventError(problem)
    if not np.isfinite(event.value) or abs(event.value) > 3e38:
        raise EventError(f"value {event.value} is not a finite 32-bit float")
    try:
        row = (
            id64(event.event_id),
            event.time_ms,
            id64(event.ad_id),
            event.value,
            schema.action_mask(event.event_types),
            schema.surface_index(event.surface),
        )
        return id64(event.user_id), row
    except (UnknownValueError, ValueError) as error:
        raise EventError(str(error)) from error


def event_rows(events: Sequence[ActivityEvent], schema: FeatureSchema) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
    """(users u8[n], rows LOG_ROW[n]) of events that are all valid; see `event_row` for errors."""
    pairs = [event_row(event, schema) for event in events]
    users = np.array([user for user, _ in pairs], dtype=np.uint64)
    return users, np.array([row for _, row in pairs], dtype=LOG_ROW)


def to_epoch_ms(moment: datetime) -> int:
    """Epoch ms of an aware datetime.

    Raises:
        EventError: the datetime is naive: it means another moment in every time zone.
    """
    if moment.tzinfo is None:
        raise EventError(f"naive datetime {moment.isoformat()}: give its UTC offset")
    return round(moment.timestamp() * 1000)
