"""Traces for the speculation simulator: who asked when, for which candidates, and what was really shown.

Two makers fill the same container. `kuairand_trace` takes arrivals, surfaces and shown ads from the real log; the log does not hold
the candidate sets, so they are filled by the causal retrieval (`streams.retrieval`). `generated_trace` (`solaris.simulate_generate`) is
synthetic, with stated reuse.

Shapes: R requests in order of time, N candidates of each, U users, A ads, S surfaces, P distinct user-ad pairs that were ever asked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

import streams.retrieval
from gem.examples import RequestLog
from streams.catalogue import external_ids
from streams.dataset import Dataset, load_dataset
from streams.retrieval import CausalRetrieval

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NONE = -1
NUM_CANDIDATES = 300
# 2022-05-01 and 2022-05-05, 00:00 in UTC+8, the zone of the log: end of the affinity's events, start of the report
KUAIRAND_SVD_UNTIL_MS = 1_651_334_400_000
KUAIRAND_REPORT_MS = 1_651_680_000_000
ZONE_MS = 8 * HOUR_MS


@dataclass(frozen=True)
class Trace:
    """Requests in order of time.

    Attributes:
        name: of the trace, for tables.
        users: i4[R] in [0, U). times_ms: i8[R], non-decreasing. surfaces: i2[R] in [0, S).
        candidates: i2[R, N] in [0, A), best first, no ad twice in a request.
        shown_request: i4[C]; request of each shown ad. shown_position: i2[C]; its place among the candidates.
        outcomes: f4[R]; share of the shown ads that were watched long. Known only after the request was answered.
        profiles: f4[U, F]; what was known of the users before the trace began; F may be 0.
        num_ads: A.
        report_ms: measures count from here on; models are fitted on what lies before.
        zone_ms: offset of the users' clock from UTC.
        histories: i2[U, L]; ads that a user was shown before the trace began, oldest first, -1 before them; L may be 0.
        ad_ages: f4[A]; age of each ad in days when the trace begins, nan where unknown; may be empty.
    """

    name: str
    users: NDArray[np.int32]
    times_ms: NDArray[np.int64]
    surfaces: NDArray[np.int16]
    candidates: NDArray[np.int16]
    shown_request: NDArray[np.int32]
    shown_position: NDArray[np.int16]
    outcomes: NDArray[np.float32]
    profiles: NDArray[np.float32]
    num_ads: int
    report_ms: int
    zone_ms: int = 0
    histories: NDArray[np.int16] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int16))
    ad_ages: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))

    def __post_init__(self) -> None:
        if len(self.times_ms) and (np.diff(self.times_ms) < 0).any():
            raise ValueError("requests must be in order of time")
        if self.candidates.shape[:1] != self.users.shape:
            raise ValueError(f"{len(self.users)} requests with candidates of shape {self.candidates.shape}")

    def __len__(self) -> int:
        """R."""
        return len(self.users)

    @property
    def num_candidates(self) -> int:
        """N."""
        return self.candidates.shape[1]

    @cached_property
    def by_user(self) -> NDArray[np.int64]:
        """The requests in order of (user, time). i8[R]."""
        return np.argsort(self.users, kind="stable")

    @cached_property
    def previous(self) -> NDArray[np.int64]:
        """The same user's request before each, -1 where there is none. i8[R]."""
        order = self.by_user
        result = np.full(len(self), NONE, dtype=np.int64)
        same = self.users[order[1:]] == self.users[order[:-1]]
        result[order[1:][same]] = order[:-1][same]
        return result

    @cached_property
    def pairs(self) -> NDArray[np.int32]:
        """A number in [0, P) for the user-ad pair of each candidate. i4[R, N]; pairs of one user are neighbours, by ad."""
        result = np.empty(self.candidates.shape, dtype=np.int32)
        cuts = np.searchsorted(self.users[self.by_user], np.arange(int(self.users.max(initial=NONE)) + 2))
        base = 0
        for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            rows = self.by_user[start:end]
            ads, numbers = np.unique(self.candidates[rows], return_inverse=True)
            result[rows] = base + numbers.reshape(len(rows), self.num_candidates)
            base += len(ads)
        return result

    @cached_property
    def num_pairs(self) -> int:
        """P."""
        return int(self.pairs.max(initial=NONE)) + 1

    @cached_property
    def user_pairs(self) -> NDArray[np.int64]:
        """First pair of each user, and P at the end. i8[U + 1]."""
        num_users = int(self.users.max(initial=NONE)) + 1
        largest = np.full(num_users, NONE, dtype=np.int64)
        np.maximum.at(largest, self.users, self.pairs.max(axis=1, initial=0))
        return np.concatenate([[0], np.maximum.accumulate(largest + 1)])

    def pairs_of(self, user: int, ads: NDArray[np.int16]) -> NDArray[np.int32]:
        """Numbers of a user's pairs with some ads; -1 - ad for pairs that are never asked for. i4[n]."""
        start, end = self.user_pairs[user : user + 2]
        own = self.pair_ads[start:end]
        if not len(own):
            return NONE - ads.astype(np.int32)
        at = np.minimum(np.searchsorted(own, ads), len(own) - 1)
        return np.where(own[at] == ads, start + at, NONE - ads.astype(np.int64)).astype(np.int32)

    @cached_property
    def pair_ads(self) -> NDArray[np.int16]:
        """The ad of each pair. i2[P]."""
        result = np.empty(self.num_pairs, dtype=np.int16)
        result[self.pairs] = self.candidates
        return result

    @cached_property
    def asks(self) -> Asks:
        """All candidates of all requests, in order of (pair, time)."""
        return Asks.of(self)

    def until(self, num: int) -> Trace:
        """The first `num` requests."""
        kept = self.shown_request < num
        return replace(
            self,
            users=self.users[:num],
            times_ms=self.times_ms[:num],
            surfaces=self.surfaces[:num],
            candidates=self.candidates[:num],
            shown_request=self.shown_request[kept],
            shown_position=self.shown_position[kept],
            outcomes=self.outcomes[:num],
        )


@dataclass(frozen=True)
class Asks:
    """All R x N asks in order of (pair, time).

    Attributes:
        flat: i4[R * N]; index of each into the flattened candidates, so that request = flat // N.
        place: i2[R * N]; how many earlier asks the pair had.
        pair_start: i4[P + 1]; asks of pair p are [pair_start[p], pair_start[p + 1]).
    """

    flat: NDArray[np.int32]
    place: NDArray[np.int16]
    pair_start: NDArray[np.int32]

    @classmethod
    def of(cls, trace: Trace) -> Asks:
        """Sorts the asks of a trace."""
        pairs = trace.pairs.ravel()
        flat = np.argsort(pairs, kind="stable").astype(np.int32)
        start = np.concatenate([[0], np.cumsum(np.bincount(pairs, minlength=trace.num_pairs))]).astype(np.int32)
        place = np.arange(len(flat), dtype=np.int32) - np.repeat(start[:-1], np.diff(start))
        return cls(flat, place.astype(np.int16), start)


def kuairand_trace(folder: str | Path = "data/kuairand", *, cache: str | Path = "runs/speculation") -> Trace:
    """The trace of the KuaiRand log: real arrivals, candidate sets filled by the causal retrieval.

    Until 05-01 the affinity knows only what lies before the log; from then on also the first six days of it. So no request is filled
    with anything from after its hour began.

    Args:
        folder: of the data set.
        cache: filled candidates are kept here, by a key of everything that they depend on.

    Raises:
        streams.schema.SchemaError: the data set is missing or does not fit.
    """
    folder, cache = Path(folder), Path(cache)
    dataset = load_dataset(folder)
    log = RequestLog.of(dataset)
    at, local = log.candidate_indices(np.arange(len(log)))
    ads = np.sort(np.fromiter(dataset.raw_ads, dtype=np.uint64, count=len(dataset.raw_ads)))
    path = cache / f"candidates-{_key(folder)}.npy"
    if path.exists():
        candidates = np.load(path)
    else:
        candidates = np.searchsorted(ads, _fill(dataset, log)).astype(np.int16)
        cache.mkdir(parents=True, exist_ok=True)
        np.save(path, candidates)
    shown = np.searchsorted(ads, log.ads[at]).astype(np.int16)
    owner, position = np.nonzero(candidates[local] == shown[:, None])
    users, numbers = np.unique(log.users, return_inverse=True)
    long_view = dataset.schema.objectives.index("long_view")
    num_shown = np.maximum(np.bincount(local, minlength=len(log)), 1)
    return Trace(
        name="kuairand",
        users=numbers.astype(np.int32),
        times_ms=log.times_ms,
        surfaces=log.surfaces.astype(np.int16),
        candidates=candidates,
        shown_request=local[owner].astype(np.int32),
        shown_position=position.astype(np.int16),
        outcomes=(np.bincount(local, log.labels[at][:, long_view], minlength=len(log)) / num_shown).astype(np.float32),
        profiles=_profiles(folder, users),
        num_ads=len(ads),
        report_ms=KUAIRAND_REPORT_MS,
        zone_ms=ZONE_MS,
        histories=_histories(folder, users, ads),
        ad_ages=_ages(folder, ads, int(log.times_ms[0])),
    )


def _fill(dataset: Dataset, log: RequestLog) -> NDArray[np.uint64]:
    parts = []
    for until, requests in (
        (int(log.times_ms[0]), log.between(None, KUAIRAND_SVD_UNTIL_MS)),
        (KUAIRAND_SVD_UNTIL_MS, log.between(KUAIRAND_SVD_UNTIL_MS, None)),
    ):
        shown = [log.ads[log.offsets[r] : log.offsets[r + 1]] for r in requests]
        retrieval = CausalRetrieval(dataset, until)
        parts.append(
            retrieval.fill(log.users[requests], log.surfaces[requests], log.times_ms[requests], shown, NUM_CANDIDATES)
        )
    return np.concatenate(parts)


def _key(folder: Path) -> str:
    digest = hashlib.sha256(f"{NUM_CANDIDATES} {KUAIRAND_SVD_UNTIL_MS}".encode())
    for path in [*sorted(folder.glob("*.parquet")), folder / "schema.toml", Path(streams.retrieval.__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _profiles(folder: Path, users: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Static columns and the untimed history of users u8[U], text as codes. f4[U, F], nan where unknown."""
    table = pl.read_parquet(folder / "users.parquet")
    history = pl.read_parquet(folder / "history.parquet").select("user_id", "history_len", "last_time_ms")
    table = table.join(history, on="user_id", how="left")
    text = [name for name, kind in table.schema.items() if kind == pl.String]
    table = table.with_columns(pl.col(name).cast(pl.Categorical).to_physical() for name in text)
    identities = external_ids(table["user_id"])
    order = np.argsort(identities)
    at = order[np.minimum(np.searchsorted(identities[order], users), len(order) - 1)]
    values = table.drop("user_id").cast(pl.Float64).to_numpy()[at]
    values[identities[at] != users] = np.nan
    return values.astype(np.float32)


def _histories(folder: Path, users: NDArray[np.uint64], ads: NDArray[np.uint64]) -> NDArray[np.int16]:
    """What users u8[U] were shown before the log, as indices into ads u8[A]. i2[U, L], oldest first, -1 before them."""
    table = pl.read_parquet(folder / "history.parquet", columns=["user_id", "watch_seq"])
    identities = external_ids(table["user_id"])
    lists = table["watch_seq"]
    flat = external_ids(lists.explode().drop_nulls())
    at = np.minimum(np.searchsorted(ads, flat), len(ads) - 1)
    known = ads[at] == flat
    owner = np.repeat(np.arange(len(table)), lists.list.len().fill_null(0).to_numpy())
    owner, at = owner[known], at[known]
    counts = np.bincount(owner, minlength=len(table))
    rows = np.full((len(table), int(counts.max(initial=0))), NONE, dtype=np.int16)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows[owner, rows.shape[1] - counts[owner] + within] = at
    order = np.argsort(identities)
    place = order[np.minimum(np.searchsorted(identities[order], users), len(order) - 1)]
    result = rows[place]
    result[identities[place] != users] = NONE
    return result


def _ages(folder: Path, ads: NDArray[np.uint64], start_ms: int) -> NDArray[np.float32]:
    """Days from the upload of ads u8[A] to the start of the log. f4[A], nan where unknown."""
    table = pl.read_parquet(folder / "items.parquet", columns=["video_id", "upload_dt"])
    days = start_ms / DAY_MS - table["upload_dt"].str.to_date(strict=False).cast(pl.Int32).cast(pl.Float32).to_numpy()
    identities = external_ids(table["video_id"])
    order = np.argsort(identities)
    place = order[np.minimum(np.searchsorted(identities[order], ads), len(order) - 1)]
    return np.where(identities[place] == ads, days[place], np.nan).astype(np.float32)
