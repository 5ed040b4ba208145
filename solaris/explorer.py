"""Candidates beyond a user's own slates: ads that are new or rising on his surface, and ads that users like him were asked about.

What an explored pair is worth is learned like that of any other (`solaris.outlook`): from whether it is asked for. All memory is bounded,
and none of it is state that anybody is promised.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from solaris.outlook import RISING_RANK, SIMILAR_RANK, Slate

HOUR_MS = 3_600_000
MAX_RISING = 256  # ads of a surface that count as rising
MAX_COUNTED = 20_000  # ads of a surface whose asks are counted within an hour
RISING_RATIO, LEAST_ASKS = 1.5, 5.0  # asks this hour against the hour before, per time passed
RING = 4_096  # users whose embeddings are compared
NEIGHBOURS = 8
NEIGHBOUR_ADS = 32  # best ads of a neighbour that are proposed


class Explorer:
    """Proposes up to `num_pairs` ads per user, half of them from each source where both have enough.

    Args:
        num_pairs: at most, per job.
        user_dim: width U of user embeddings.
    """

    def __init__(self, num_pairs: int, user_dim: int) -> None:
        if num_pairs < 0:
            raise ValueError(f"explore_pairs must not be negative, found {num_pairs}")
        self.num_pairs = num_pairs
        self._now: dict[int, Counter[int]] = {}
        self._before: dict[int, Counter[int]] = {}
        self._rising: dict[int, tuple[int, NDArray[np.uint64]]] = {}
        self._hour = 0
        self._embeddings = np.zeros((RING, user_dim), dtype=np.float32)
        self._ads = np.zeros((RING, NEIGHBOUR_ADS), dtype=np.uint64)
        self._num_ads = np.zeros(RING, dtype=np.int64)
        self._slots: dict[int, int] = {}
        self._owners: list[int] = []
        self._next = 0

    def observe(self, slate: Slate) -> None:
        """A request's ads, in the order of event time or nearly so."""
        hour = slate.time_ms // HOUR_MS
        if hour > self._hour:
            self._before = self._now if hour == self._hour + 1 else {}
            self._now, self._hour, self._rising = {}, hour, {}
        if hour == self._hour:
            counts = self._now.setdefault(slate.surface, Counter())
            if len(counts) < MAX_COUNTED:
                counts.update(slate.ads.tolist())

    def remember(self, user: int, embedding: NDArray[np.float32], slate: Slate) -> None:
        """A user's embedding f4[U] and what he was asked about, for users like him."""
        norm = float(np.linalg.norm(embedding))
        if not len(slate.ads) or norm == 0:
            return
        slot = self._slots.get(user)
        if slot is None:
            slot, self._next = self._next, (self._next + 1) % RING
            if slot < len(self._owners):
                del self._slots[self._owners[slot]]
                self._owners[slot] = user
            else:
                self._owners.append(user)
            self._slots[user] = slot
        best = slate.ads[np.argsort(slate.ranks, kind="stable")[:NEIGHBOUR_ADS]]
        self._embeddings[slot] = embedding / norm
        self._ads[slot, : len(best)], self._num_ads[slot] = best, len(best)

    def propose(self, user: int, slate: Slate, embedding: NDArray[np.float32] | None, time_ms: int) -> Slate:
        """The slate with explored ads after its own; their ranks name the source.

        Args:
            user: who. slate: his. embedding: f4[U] of his last run, if there was one.
            time_ms: now, in event time.
        """
        if not self.num_pairs or not len(slate.ads):
            return slate
        similar = _without(self._similar(user, embedding), slate.ads)
        rising = _without(self._rising_on(slate.surface, time_ms), np.concatenate([slate.ads, similar]))
        half = self.num_pairs // 2
        similar = similar[: max(self.num_pairs - len(rising), half)]
        rising = rising[: self.num_pairs - len(similar)]
        ads = np.concatenate([slate.ads, similar, rising])
        more = len(similar) + len(rising)
        return Slate(
            ads=ads,
            ranks=np.concatenate([slate.ranks, np.full(len(similar), SIMILAR_RANK), np.full(len(rising), RISING_RANK)]),
            logits=np.concatenate([slate.logits, np.zeros(more)]),
            levels=np.concatenate([slate.levels, np.zeros(more, dtype=np.int64)]),
            surface=slate.surface,
            time_ms=slate.time_ms,
        )

    def _similar(self, user: int, embedding: NDArray[np.float32] | None) -> NDArray[np.uint64]:
        """Ads of the nearest users, those of most weight first."""
        num = len(self._owners)
        if embedding is None or num < 2:
            return np.zeros(0, dtype=np.uint64)
        closeness = self._embeddings[:num] @ embedding / max(float(np.linalg.norm(embedding)), 1e-12)
        own = self._slots.get(user)
        if own is not None:
            closeness[own] = -np.inf
        count = min(NEIGHBOURS, num)
        near = np.argpartition(-closeness, count - 1)[:count]
        near = near[closeness[near] > 0]
        if not len(near):
            return np.zeros(0, dtype=np.uint64)
        ads = np.concatenate([self._ads[slot, : self._num_ads[slot]] for slot in near])
        weights = np.repeat(closeness[near], self._num_ads[near])
        known, at = np.unique(ads, return_inverse=True)
        found: NDArray[np.uint64] = known[np.argsort(-np.bincount(at, weights), kind="stable")]
        return found

    def _rising_on(self, surface: int, time_ms: int) -> NDArray[np.uint64]:
        """Ads asked for more than an hour ago, most asked first; refreshed with each minute of event time."""
        minute = time_ms // 60_000
        known = self._rising.get(surface)
        if known is not None and known[0] == minute:
            return known[1]
        passed = max((time_ms - self._hour * HOUR_MS) / HOUR_MS, 1 / 60)
        before = self._before.get(surface, Counter())
        rising = [
            (count, ad)
            for ad, count in self._now.get(surface, Counter()).items()
            if count >= LEAST_ASKS and count > RISING_RATIO * passed * before.get(ad, 0)
        ]
        rising.sort(reverse=True)
        ads = np.array([ad for _, ad in rising[:MAX_RISING]], dtype=np.uint64)
        self._rising[surface] = minute, ads
        return ads


def _without(ads: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return ads[~np.isin(ads, known)]
