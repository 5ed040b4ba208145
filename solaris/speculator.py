"""Which pairs are about to be asked for, and how much it is worth to have them.

The first guess is the ranker's own: what it was asked about for a user, it will be asked about again, the best before the rest. A
user's slate is kept in the store, so that workers hold no state that a restart could lose; his activity is the moment to compute it
anew. What a pair is worth is learned from the served log (`solaris.outlook`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import redis
from numpy.typing import NDArray

from solaris.budget import Cost
from solaris.explorer import Explorer
from solaris.outlook import Outlook, Slate
from streams.features import SLATE, FmLayout
from streams.levels import Level
from streams.recent import Recent
from streams.requests import ServedRequest
from streams.store import EmbeddingStore, Rows, lookup

SLATE_TTL_MS = 7 * 86_400_000
SLATE_VERSION = 0  # a slate belongs to no model
SLATE_DIM = 4  # surface, rank, logit, level; as f16, which holds whole numbers up to 2,048
MAX_LOGIT = 15.0
MAX_WORTHS = 100_000  # users whose slate's worth is remembered
MAX_EXPLORED = 20_000  # users of whom it is remembered what was explored, some kB each


@dataclass(frozen=True)
class Plan:
    """What to compute of one user.

    Attributes:
        ads: u8[n]; values: f4[n], expected gain of each pair's row.
        explored: bool[n], which of them lie beyond the user's own slate.
        surface: for which the pairs are computed.
        flops: cost. worthwhile: whether the gain pays for f_R as well.
        asked: f4[m], expected gain of all pairs of the slate, chosen or not.
    """

    ads: NDArray[np.uint64]
    values: NDArray[np.float32]
    explored: NDArray[np.bool_]
    surface: int
    flops: float
    worthwhile: bool
    asked: NDArray[np.float32]


class Speculator:
    """Turns served requests into slates, and slates into plans.

    Args:
        client: of the store.
        layout: of the rows.
        version: FM version whose rows count as there.
        cost: of the FM.
        slate_size: ads kept of a user: the newest requests' best.
        explore_pairs: ads beyond the slate that may be added to a job.
    """

    def __init__(
        self, client: redis.Redis, layout: FmLayout, version: int, cost: Cost, slate_size: int, explore_pairs: int = 0
    ) -> None:
        if slate_size < 1:
            raise ValueError(f"slate_size must be at least 1, found {slate_size}")
        self.slate_size = slate_size
        self.outlook = Outlook(layout.ttl_ms)
        self.store = EmbeddingStore(
            client, kind=SLATE, dim=SLATE_DIM, max_rows=slate_size, ttl_ms=SLATE_TTL_MS, failover_ttl_ms=SLATE_TTL_MS
        )
        self.explorer = Explorer(explore_pairs, layout.user_dim)
        self._explored = Recent[int, Slate](MAX_EXPLORED)
        self._layout, self._version, self._cost = layout, version, cost
        self._worths = Recent[int, float](MAX_WORTHS)
        self._mean_worth = 1.0

    def remember(self, served: Sequence[ServedRequest]) -> None:
        """Keeps the slates of served requests and learns from those that are new."""
        if not served:
            return
        users = np.array(sorted({request.user for request in served}), dtype=np.uint64)
        replies = self.store.raw_many(users)
        last = {int(user): slate_of(self.store.decode(reply)) for user, reply in zip(users, replies, strict=True)}
        requests = sorted(served, key=lambda one: one.time_ms)
        slates = [self._slate(request) for request in requests]
        # First the writes: if they fail, the records come again, and what was learned would be learned twice.
        rows = [_rows(slate, self.slate_size) for slate in slates]
        self.store.write([request.user for request in requests], rows)
        for request, slate in zip(requests, slates, strict=True):
            before = last[request.user]
            if len(slate.ads) and slate.time_ms > before.time_ms:
                self.outlook.learn(self._explored.pop(request.user, before), slate)
                self.outlook.returns.observe(request.user, slate.time_ms)
                self.outlook.trends.observe(slate.ads, slate.time_ms)
                self.explorer.observe(slate)
                self._remember_worth(request.user, slate)
                last[request.user] = slate

    def value(self, user: int) -> float:
        """Expected gain of computing a user's rows now; asked before anything of him is read."""
        return self.outlook.returns.expect(user) * self._worths.get(user, self._mean_worth)

    def explore(self, user: int, slate: Slate, embedding: NDArray[np.float32] | None, time_ms: int) -> Slate:
        """The slate with ads from beyond it, if that is wanted; see `Explorer.propose`."""
        if not self.explorer.num_pairs:
            return slate
        if embedding is not None:
            self.explorer.remember(user, embedding, slate)
        wider = self.explorer.propose(user, slate, embedding, time_ms)
        self._explored[user] = wider
        return wider

    def plan(
        self,
        users: Sequence[int],
        slates: Sequence[Slate],
        rows: Sequence[Rows],
        newest_ms: Sequence[int],
        price: float,
    ) -> list[Plan]:
        """Chooses the pairs that are worth more than they cost.

        Args:
            users: who. slates: theirs. rows: their pair rows as they stand, vectors not needed. newest_ms: of their events.
            price: gain that a FLOP must bring; at 0 whole slates are computed.
        """
        if not users:
            return []
        sizes = [len(slate.ads) for slate in slates]
        level = np.concatenate([self._levels(*known) for known in zip(slates, rows, newest_ms, strict=True)])
        visits = np.repeat([self.outlook.returns.expect(user) for user in users], sizes)
        values = self.outlook.persistence(Slate.concatenate(slates)) * self.outlook.gains()[level] * visits
        plans, start = [], 0
        least, request = price * self._cost.pair_flops, price * self._cost.request_flops
        for slate, size in zip(slates, sizes, strict=True):
            own = values[start : start + size].astype(np.float32)
            chosen = np.flatnonzero(own > least) if price > 0 else np.arange(size)
            plans.append(
                Plan(
                    ads=slate.ads[chosen],
                    values=own[chosen],
                    explored=slate.explored[chosen],
                    surface=slate.surface,
                    flops=self._cost.of(len(chosen)),
                    worthwhile=price <= 0 or float((own[chosen] - least).sum()) > request,
                    asked=own,
                )
            )
            start += size
        return plans

    def _levels(self, slate: Slate, rows: Rows, newest_ms: int) -> NDArray[np.int64]:
        """What a candidate would be served with now: its row, or else what was read for it, unless that was a row that has gone."""
        ttl_ms, failover_ttl_ms = self._layout.ttl_ms, self._layout.failover_ttl_ms
        _, level, _ = lookup(rows, slate.ads, max(slate.time_ms, newest_ms) + 1, self._version, ttl_ms, failover_ttl_ms)
        return np.where(level == Level.NONE, np.minimum(slate.levels, Level.USER_AGGREGATE), level)

    def _slate(self, served: ServedRequest) -> Slate:
        scores = np.clip(np.array(served.scores, dtype=np.float64), 1e-6, 1 - 1e-6)
        ads = np.array(served.ads, dtype=np.uint64)
        return Slate(
            ads=ads,
            ranks=np.arange(len(ads)),
            logits=np.log(scores / (1 - scores)),
            levels=np.clip(np.array(served.levels, dtype=np.int64), 0, max(Level)),
            surface=served.surface,
            time_ms=served.time_ms,
        )

    def _remember_worth(self, user: int, slate: Slate) -> None:
        worth = float((self.outlook.persistence(slate) * self.outlook.gains()[slate.levels]).sum())
        self._mean_worth += 0.01 * (worth - self._mean_worth)
        self._worths[user] = worth


def slate_of(rows: Rows) -> Slate:
    """A stored slate; empty where none is known."""
    if not len(rows.ads):
        none = np.zeros(0, dtype=np.int64)
        return Slate(rows.ads, none, np.zeros(0), none, 0, 0)
    surface, rank, logit, level = rows.vectors.T
    newest = int(rows.state_ms.argmax())
    return Slate(
        ads=rows.ads,
        ranks=rank.astype(np.int64),
        logits=logit.astype(np.float64),
        levels=level.astype(np.int64),
        surface=int(surface[newest]),
        time_ms=int(rows.state_ms[newest]),
    )


def _rows(slate: Slate, most: int) -> Rows:
    ads = slate.ads[:most]
    num = len(ads)
    columns = [np.full(num, slate.surface), slate.ranks[:num], slate.logits[:num], slate.levels[:num]]
    return Rows(
        ads=ads,
        state_ms=np.full(num, slate.time_ms, dtype=np.int64),
        versions=np.full(num, SLATE_VERSION, dtype=np.uint64),
        vectors=np.stack(columns, axis=1).astype(np.float32),
    )
