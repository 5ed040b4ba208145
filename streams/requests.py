"""`RankRequest` and `ServedRequest`: what callers ask of the ranking API and what the API logs of each answer."""

from __future__ import annotations

from typing import Annotated

import msgspec

from streams.ids import ExternalId

SERVED_TOPIC = "served"
SERVED_VERSION = 1
MAX_CANDIDATES = 2_000


class RankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to rank ads for a user.

    Attributes:
        user_id: who; int or str. An unknown user is ranked as cold.
        surface: where the ads will be shown; one of the schema's surfaces.
        candidates: the ads to rank, at most `MAX_CANDIDATES`; retrieval is the caller's.
        time_ms: moment of the request, epoch ms; the server's clock where absent. Replays set it.
        objective: which probability orders the answer; the schema's first objective where absent.
        top: how many ranked ads to return; all where absent.
        variant: a ranker of the registry; the router's choice where absent.
        request_id: the caller's identity of the request; made by the server where absent.
        shadow: a request of an experiment: answered, but not put into the served log, so that nothing follows from it.
    """

    user_id: ExternalId
    surface: str
    candidates: Annotated[list[ExternalId], msgspec.Meta(min_length=1, max_length=MAX_CANDIDATES)]
    time_ms: int | None = None
    objective: str | None = None
    top: Annotated[int, msgspec.Meta(ge=1)] | None = None
    variant: str | None = None
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    shadow: bool = False


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What was answered: the input of speculation and, with the later activity, of training.

    Attributes:
        request_id: identity of the request; a record again is the same request again.
        user: 64-bit identity of the user.
        surface: index into the schema's surfaces.
        time_ms: moment of the request, epoch ms.
        ads: 64-bit identities, best first.
        scores: probability of the ordering objective, per ad.
        levels: `streams.levels.Level` of the embedding that was read, per ad.
        ages_ms: age of that embedding, per ad; -1 where there was none.
        variant: the ranker that answered.
        model: content hash of the ranker.
        fm_version: FM version (u64) whose embeddings were read.
        degraded: whether the store could not be read.
    """

    request_id: str
    user: int
    surface: int
    time_ms: int
    ads: list[int]
    scores: list[float]
    levels: list[int]
    ages_ms: list[int]
    variant: str
    model: str
    fm_version: int
    degraded: bool
    v: int = SERVED_VERSION


class ServedRecordError(ValueError):
    """A record of the served log that does not parse; the message says what is wrong."""


_decoder = msgspec.json.Decoder(ServedRequest)
_encoder = msgspec.json.Encoder()


def encode_served(served: ServedRequest) -> bytes:
    """The record as JSON bytes."""
    return _encoder.encode(served)


def decode_served(value: bytes) -> ServedRequest:
    """Parses one record of the served log.

    Raises:
        ServedRecordError: not JSON, a field missing or ill-typed, lists of unequal length, another version.
    """
    try:
        served = _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise ServedRecordError(f"not a served request: {error}") from error
    if served.v != SERVED_VERSION:
        raise ServedRecordError(f"unknown version {served.v} of a served request; legal values: {SERVED_VERSION}")
    if not len(served.ads) == len(served.scores) == len(served.levels) == len(served.ages_ms):
        raise ServedRecordError("ads, scores, levels and ages_ms of a served request differ in length")
    for name, ids in (("user", [served.user]), ("ads", served.ads)):
        if ids and not 0 <= min(ids) <= max(ids) < 2**64:
            raise ServedRecordError(f"{name} of a served request: {min(ids)} to {max(ids)} are no 64-bit identities")
    return served
