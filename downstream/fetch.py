"""One round trip to the store per request: the user's history, his pair rows and his own row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import redis
from numpy.typing import NDArray

from streams.features import PAIRS, USER, FmFeatures, FmLayout, resolve_rows, store_of
from streams.rows import LOG_ROW
from streams.user_log import UserLog


@dataclass(frozen=True)
class Fetched:
    """What the store knows of a request's user.

    Attributes:
        history: LOG_ROW[L]; events strictly before the request, oldest first.
        features: of the request's candidates.
        degraded: whether the store could not be read: then the history is empty and every level is none.
    """

    history: NDArray[np.void]
    features: FmFeatures
    degraded: bool


class Fetcher:
    """Reads the store for one ranker process."""

    def __init__(self, client: redis.Redis, layout: FmLayout, fm_version: int, history: int) -> None:
        self.layout, self.fm_version, self.history = layout, fm_version, history
        self._client = client
        self._log = UserLog(client)
        self.pairs = store_of(client, PAIRS, layout)
        self.users = store_of(client, USER, layout)

    def fetch(self, user: int, surface: int, time_ms: int, ads: NDArray[np.uint64]) -> Fetched:
        """Reads and resolves; never raises for a store that is down, slow or wrong."""
        try:
            pipe = self._client.pipeline(transaction=False)
            self._log.queue_history(pipe, user, time_ms, self.history)
            self.pairs.queue_read(pipe, user)
            self.users.queue_read(pipe, user)
            history, pairs, own = pipe.execute()
        except (redis.RedisError, OSError):
            return Fetched(np.empty(0, dtype=LOG_ROW), FmFeatures.none(len(ads), self.layout), degraded=True)
        features = resolve_rows(
            self.pairs.decode(pairs), self.users.decode(own), ads, surface, time_ms, self.fm_version, self.layout
        )
        try:
            return Fetched(self._log.decode_history(history), features, degraded=False)
        except ValueError:  # a member that is no event: somebody else wrote to the key
            return Fetched(np.empty(0, dtype=LOG_ROW), features, degraded=True)
