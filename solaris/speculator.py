"""Which pairs are about to be asked for, and how much it is worth to have them.

The first guess is the ranker's own: the ads that it scored best for a user are those that it will be asked about next. A user's slate
is kept in the store, so that workers hold no state that a restart could lose; his activity is the moment to compute it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import redis
from numpy.typing import NDArray

from streams.features import SLATE
from streams.levels import Level
from streams.requests import ServedRequest
from streams.store import EmbeddingStore, Rows

SLATE_TTL_MS = 7 * 86_400_000
SLATE_VERSION = 0  # a slate belongs to no model
MISS = Level.PAIR_STALE  # below this level a served candidate is a miss


@dataclass(frozen=True)
class Slate:
    """A user's speculated ads: u8[n], and the surface on which they are expected."""

    ads: NDArray[np.uint64]
    surface: int


class Speculator:
    """Turns served requests into slates, and slates into jobs' candidates.

    Args:
        client: of the store.
        slate_size: ads kept of a user: the newest slates' best.
    """

    def __init__(self, client: redis.Redis, slate_size: int) -> None:
        if slate_size < 1:
            raise ValueError(f"slate_size must be at least 1, found {slate_size}")
        self.slate_size = slate_size
        self._store = EmbeddingStore(
            client, kind=SLATE, dim=1, max_rows=slate_size, ttl_ms=SLATE_TTL_MS, failover_ttl_ms=SLATE_TTL_MS
        )

    def remember(self, served: Sequence[ServedRequest]) -> dict[int, float]:
        """Keeps the slates of served requests; returns the value of computing each user's rows now."""
        slates: dict[int, list[ServedRequest]] = {}
        for request in served:
            slates.setdefault(request.user, []).append(request)
        rows = [(user, self._rows(request)) for user, requests in slates.items() for request in requests]
        if rows:
            self._store.write([user for user, _ in rows], [row for _, row in rows])
        return {user: max(self.value(request) for request in requests) for user, requests in slates.items()}

    def slates(self, users: NDArray[np.uint64]) -> list[Slate]:
        """The slate of each user; empty where none is known."""
        return [self._slate(rows) for rows in self._store.read_many(users)]

    @staticmethod
    def value(served: ServedRequest) -> float:
        """Expected gain of computing a request's slate: its misses, each weighted by the score that its ad got."""
        return float(sum(score for score, level in zip(served.scores, served.levels, strict=True) if level < MISS))

    def _rows(self, served: ServedRequest) -> Rows:
        ads = np.array(served.ads[: self.slate_size], dtype=np.uint64)
        num = len(ads)
        return Rows(
            ads=ads,
            state_ms=np.full(num, served.time_ms, dtype=np.int64),
            versions=np.full(num, SLATE_VERSION, dtype=np.uint64),
            vectors=np.full((num, 1), served.surface, dtype=np.float32),
        )

    @staticmethod
    def _slate(rows: Rows) -> Slate:
        if not len(rows.ads):
            return Slate(rows.ads, 0)
        return Slate(rows.ads, int(rows.vectors[rows.state_ms.argmax(), 0]))
