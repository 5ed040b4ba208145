"""A small causal retrieval that fills a request to N candidates around the ads really shown, for replay, demo and simulation.

It is not part of serving, where candidates come from the caller. Score of an ad for a user on a surface:
log(1 + popularity on the surface + .3 × on all) + 1.5 × cosine of user and ad in an SVD of earlier events. Popularity decays with a
half-life of 12 h and is a snapshot at the start of the hour, so that nothing of the request's own hour leaks into it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.utils.extmath import randomized_svd

from streams.dataset import Dataset

HOUR_MS = 3_600_000
HALF_LIFE_HOURS = 12.0
OTHER_SURFACES = 0.3
AFFINITY = 1.5
SVD_DIM = 24


class CausalRetrieval:
    """Candidates for requests of a dataset, in order of time."""

    def __init__(self, dataset: Dataset, svd_until_ms: int) -> None:
        """Fits the affinity on the events before `svd_until_ms` only; requests from then on may be filled."""
        self.until_ms = svd_until_ms
        self.ads = np.sort(np.fromiter(dataset.raw_ads, dtype=np.uint64, count=len(dataset.raw_ads)))
        self._event_ad = np.searchsorted(self.ads, dataset.rows["ad"])
        self._event_hour = dataset.rows["time_ms"] // HOUR_MS
        self._event_surface = dataset.rows["surface"]
        self._num_surfaces = len(dataset.schema.surfaces)
        users, rows = dataset.all_events
        earlier = (rows["time_ms"] < svd_until_ms) & np.isin(rows["ad"], self.ads)
        self._users, user_index = np.unique(users[earlier], return_inverse=True)
        matrix = sp.csr_matrix(
            (np.ones(int(earlier.sum()), np.float32), (user_index, np.searchsorted(self.ads, rows["ad"][earlier]))),
            shape=(len(self._users), len(self.ads)),
        )
        matrix.data = np.minimum(matrix.data, 3.0)
        rank = min(SVD_DIM, min(matrix.shape) - 1)
        left, strength, right = randomized_svd(matrix, rank, random_state=0)
        self._user_vectors = _unit(left * strength)
        self._ad_vectors = _unit(right.T)

    def fill(
        self,
        users: NDArray[np.uint64],
        surfaces: NDArray[np.int64],
        times_ms: NDArray[np.int64],
        shown: list[NDArray[np.uint64]],
        num: int,
    ) -> NDArray[np.uint64]:
        """Candidates of requests in order of time: the `num` best, the shown ads put in at the end where they are missing.

        Args:
            users: u8[R]. surfaces: i8[R]. times_ms: i8[R], non-decreasing.
            shown: R arrays of the ads really shown; at most `num` each are kept.
            num: candidates per request.

        Returns:
            u8[R, num].

        Raises:
            ValueError: a request before the end of the affinity's events (it would see the future), or too few ads.
        """
        if len(times_ms) and times_ms.min() < self.until_ms:
            raise ValueError(
                f"a request at {times_ms.min()} ms lies before {self.until_ms} ms, the end of the affinity's events"
            )
        if num > len(self.ads):
            raise ValueError(f"{num} candidates asked of {len(self.ads)} ads")
        result = np.empty((len(users), num), dtype=np.uint64)
        at = np.searchsorted(self._users, users)
        at[at == len(self._users)] = 0
        known = self._users[at] == users
        for start, end, popularity in self._hours(times_ms):
            part = slice(start, end)
            affinity = (self._user_vectors[at[part]] * known[part, None]) @ self._ad_vectors.T
            score = popularity[surfaces[part]] + AFFINITY * affinity
            best = np.argpartition(-score, num - 1, axis=1)[:, :num]
            order = np.argsort(-np.take_along_axis(score, best, axis=1), axis=1, kind="stable")
            result[part] = self.ads[np.take_along_axis(best, order, axis=1)]
        for r, ads in enumerate(shown):
            missing = [ad for ad in dict.fromkeys(ads.tolist()) if ad not in result[r]][:num]
            if missing:
                keep = ~np.isin(result[r], ads)
                # drop the worst of those not shown
                drop = np.flatnonzero(keep)[-len(missing) :]
                result[r, drop] = missing
        return result

    def _hours(self, times_ms: NDArray[np.int64]) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
        """(first request, last request + 1, log popularity f4[S, A]) of each hour that has requests."""
        hours = times_ms // HOUR_MS
        counts = np.zeros((self._num_surfaces, len(self.ads)), dtype=np.float32)
        decay = np.float32(0.5 ** (1 / HALF_LIFE_HOURS))
        seen = 0
        clock = int(self._event_hour[0]) if len(self._event_hour) else 0
        for hour in np.unique(hours):
            while clock < hour:
                end = int(np.searchsorted(self._event_hour, clock, side="right"))
                np.add.at(counts, (self._event_surface[seen:end], self._event_ad[seen:end]), 1.0)
                counts *= decay
                seen, clock = end, clock + 1
            start, stop = np.searchsorted(hours, [hour, hour + 1])
            yield int(start), int(stop), np.log1p(counts + OTHER_SURFACES * counts.sum(0))


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    norm = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(norm, 1e-9)).astype(np.float32)
