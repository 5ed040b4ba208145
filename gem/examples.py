"""`RequestLog`: the training unit is a request with its candidates and labels (ROO, arXiv 2508.05640), drawn from a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streams.dataset import Dataset
from streams.encode import Encoder, RequestBatch
from streams.user_log import OfflineUserLog


@dataclass(frozen=True)
class RequestLog:
    """Requests of a log, in order of time. R requests, C shown candidates, K objectives.

    Attributes:
        encoder: the one encoder.
        log: offline user log: histories joined on demand, never stored per request.
        users: u8[R]. surfaces: i8[R]. times_ms: i8[R].
        offsets: i8[R + 1]; candidates of request r.
        ads: u8[C]. labels: f4[C, K].
        events: i8[C]; index of each candidate's impression in the dataset. event_times_ms: i8[C]; its moment.
    """

    encoder: Encoder
    log: OfflineUserLog
    users: NDArray[np.uint64]
    surfaces: NDArray[np.int64]
    times_ms: NDArray[np.int64]
    offsets: NDArray[np.int64]
    ads: NDArray[np.uint64]
    labels: NDArray[np.float32]
    events: NDArray[np.int64]
    event_times_ms: NDArray[np.int64]

    @classmethod
    def of(cls, dataset: Dataset) -> RequestLog:
        """Groups the impressions of a dataset into requests."""
        group = dataset.requests()
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group) if len(group) else np.zeros(0, dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        first = order[offsets[:-1]]
        return cls(
            encoder=dataset.encoder,
            log=OfflineUserLog.from_rows(*dataset.all_events),
            users=dataset.users[first],
            surfaces=dataset.rows["surface"][first].astype(np.int64),
            times_ms=dataset.rows["time_ms"][first],
            offsets=offsets,
            ads=dataset.rows["ad"][order],
            labels=dataset.labels[order],
            events=order,
            event_times_ms=dataset.rows["time_ms"][order],
        )

    def __len__(self) -> int:
        """R."""
        return len(self.users)

    def between(self, start_ms: int | None, end_ms: int | None) -> NDArray[np.int64]:
        """Indices of the requests in [start, end); None = open. i8[r]."""
        low = 0 if start_ms is None else int(np.searchsorted(self.times_ms, start_ms))
        high = len(self) if end_ms is None else int(np.searchsorted(self.times_ms, end_ms))
        return np.arange(low, high)

    def candidate_indices(self, requests: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(indices i8[c] into `ads`, request of each i8[c]) of some requests' candidates."""
        counts = self.offsets[requests + 1] - self.offsets[requests]
        local = np.repeat(np.arange(len(requests)), counts)
        within = np.arange(len(local)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.offsets[requests][local] + within, local

    def encode(
        self, requests: NDArray[np.int64], limit: int, *, frozen_ms: int | None = None
    ) -> tuple[RequestBatch, NDArray[np.float32]]:
        """Encodes requests with the history of their users.

        Args:
            requests: i8[r].
            limit: newest events of a user that are read.
            frozen_ms: histories end here, at the latest (for per-user metrics; see `gem.metrics`).

        Returns:
            (batch, labels f4[c, K]).
        """
        times = self.times_ms[requests]
        before = times if frozen_ms is None else np.minimum(times, frozen_ms)
        history, offsets = self.log.histories(self.users[requests], before, limit)
        at, local = self.candidate_indices(requests)
        batch = self.encoder.encode(
            self.users[requests], self.surfaces[requests], times, history, offsets, self.ads[at], local
        )
        return batch, self.labels[at]

    def batches(
        self, requests: NDArray[np.int64], size: int, limit: int, *, rng: np.random.Generator | None = None
    ) -> Iterator[NDArray[np.int64]]:
        """Splits requests into batches of similar history length, so that padding and ragged tails stay small.

        With `rng` the order of requests and of batches is shuffled; otherwise requests keep their order.
        """
        if rng is None:
            yield from (requests[i : i + size] for i in range(0, len(requests), size))
            return
        shuffled = rng.permutation(requests)
        pool = size * 16
        batches = []
        for start in range(0, len(shuffled), pool):
            part = shuffled[start : start + pool]
            length = np.diff(self.log.histories(self.users[part], self.times_ms[part], limit)[1])
            part = part[np.argsort(length, kind="stable")]
            batches += [part[i : i + size] for i in range(0, len(part), size)]
        yield from (batches[i] for i in rng.permutation(len(batches)))
