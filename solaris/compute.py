"""From users to rows: what the store knows of them, what is worth computing, one FM run, one write.

What a job computes is a function of the user's log and slate as they stand, never of what a worker remembers; memory only decides, under
a finite budget, which pairs are worth their FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray

from loopfm.represent import Representer
from solaris.outlook import Slate
from solaris.speculator import Plan, Speculator, slate_of
from streams.features import PAIRS, USER, USER_ROW, store_of
from streams.levels import Level
from streams.rows import user_key
from streams.store import Rows, write_seen
from streams.user_log import FOREVER_MS, UserLog


@dataclass(frozen=True)
class Known:
    """A user as the store has him: one round trip for all users of a run."""

    user: int
    slate: Slate
    pairs: Rows
    state_ms: int | None
    history: NDArray[np.void]
    raw_pairs: bytes | None
    raw_user: bytes | None


@dataclass
class Done:
    """What a run did.

    Attributes:
        users, pairs: computed.
        unchanged: users without enough new events. worthless: users whose gain would not pay.
        lost: users whom another worker came between; to be run again.
        flops: spent.
        asked: f4[n], expected gain of every pair that was considered.
    """

    users: int = 0
    pairs: int = 0
    unchanged: int = 0
    worthless: int = 0
    lost: list[int] = field(default_factory=list)
    flops: float = 0.0
    asked: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))


class Computer:
    """Computes and writes the rows of users.

    Args:
        client: of the store.
        representer: the FM.
        speculator: chooses the pairs.
        max_rows: of a user's pairs that the store keeps.
        min_events: new events that a user must have before his rows are computed anew.
    """

    def __init__(
        self, client: redis.Redis, representer: Representer, speculator: Speculator, *, max_rows: int, min_events: int
    ) -> None:
        if min_events < 1:
            raise ValueError(f"min_events must be at least 1, found {min_events}")
        self._client, self._representer, self._speculator = client, representer, speculator
        self._min_events = min_events
        layout = representer.layout
        self._user_dim = layout.user_dim
        self.pairs = store_of(client, PAIRS, layout, max_rows=max_rows)
        self.users = store_of(client, USER, layout, max_rows=1)
        self._log = UserLog(client)

    def run(self, users: Sequence[int], price: float, events: dict[int, int] | None = None) -> Done:
        """Computes the rows of users; a user without any event has no state to compute, and his first event will bring him back.

        Args:
            users: distinct.
            price: gain that a FLOP must bring.
            events: how many came for each user since his last run, also late ones, which the log does not show; reset here.
        """
        events = {} if events is None else events
        done = Done()
        known = []
        for one in self._read(users):
            if not len(one.history):
                continue
            if self._due(one, price, events.get(one.user, 0)):
                known.append(one)
            else:
                done.unchanged += 1
        plans = self._speculator.plan(
            [one.user for one in known],
            [one.slate for one in known],
            [one.pairs for one in known],
            [int(one.history["time_ms"][-1]) for one in known],
            price,
        )
        work = [(one, plan) for one, plan in zip(known, plans, strict=True) if plan.worthwhile]
        done.worthless = len(known) - len(work)
        if plans:
            done.asked = np.concatenate([plan.asked for plan in plans])
        if work:
            done.lost = self._compute([one for one, _ in work], [plan for _, plan in work])
        for one in known:  # only now: a run that failed or was lost comes again, and must find him due
            if one.user not in done.lost:
                events.pop(one.user, None)
        done.users, done.pairs = len(work), sum(len(plan.ads) for _, plan in work)
        done.flops = sum(plan.flops for _, plan in work)
        return done

    def _read(self, users: Sequence[int]) -> list[Known]:
        pipe: Any = self._client.pipeline(transaction=False)
        stores = (self._speculator.store, self.pairs, self.users)
        for user in users:
            pipe.execute_command("MGET", *(user_key(user, store.kind) for store in stores))  # of one hash slot
            self._log.queue_history(pipe, user, FOREVER_MS, self._representer.engine.history)
        replies = pipe.execute()
        known = []
        for user, (raw_slate, pairs, own), history in zip(users, replies[::2], replies[1::2], strict=True):
            row = self.users.decode_keys(own)
            state_ms = int(row.state_ms[0]) if len(row) and row.versions[0] == self._representer.version else None
            events = self._log.decode_history(history)
            slate = slate_of(self._speculator.store.decode(raw_slate))
            if self._speculator.explorer.num_pairs and len(events):
                embedding = None if state_ms is None else self.users.decode(own).vectors[0, : self._user_dim]
                slate = self._speculator.explore(user, slate, embedding, int(events["time_ms"][-1]))
            known.append(
                Known(
                    user=user,
                    slate=slate,
                    pairs=self.pairs.decode_keys(pairs),
                    state_ms=state_ms,
                    history=events,
                    raw_pairs=pairs,
                    raw_user=own,
                )
            )
        return known

    def _due(self, one: Known, price: float, events: int) -> bool:
        """Whether enough has happened since the user's rows were computed, or some of his slate has none."""
        if self._min_events == 1 or one.state_ms is None:
            return True
        new = int(np.count_nonzero(one.history["time_ms"] > one.state_ms))
        if max(new, events) >= min(self._min_events, self._representer.engine.history):
            return True
        if price > 0:
            return False  # pairs without rows were not worth them
        ads = one.slate.ads[~one.slate.explored]
        _, level, _ = self.pairs.lookup(one.pairs, ads, one.state_ms + 1, self._representer.version)
        return bool((level == Level.NONE).any())

    def _compute(self, known: list[Known], plans: list[Plan]) -> list[int]:
        users = np.array([one.user for one in known], dtype=np.uint64)
        history = np.concatenate([one.history for one in known])
        offsets = np.concatenate([[0], np.cumsum([len(one.history) for one in known])])
        state_ms = history["time_ms"][offsets[1:] - 1]
        sizes = [len(plan.ads) for plan in plans]
        ads = np.concatenate([plan.ads for plan in plans])
        owner = np.repeat(np.arange(len(users)), sizes)
        surfaces = np.array([plan.surface for plan in plans])
        embeddings, pairs = self._representer.at_states(users, state_ms, surfaces, history, offsets, ads, owner)
        cuts = np.concatenate([[0], np.cumsum(sizes)])
        explored = np.concatenate([plan.explored for plan in plans])
        own = self._representer.user_rows(embeddings, pairs, cuts, ads, ~explored)
        version = self._representer.version
        rows = [
            _rows(plan.ads, int(state), version, pairs[start:end], plan.values)
            for plan, state, start, end in zip(plans, state_ms, cuts[:-1], cuts[1:], strict=True)
        ]
        one_ad = np.array([USER_ROW], dtype=np.uint64)
        own_rows = [_rows(one_ad, int(state), version, own[b : b + 1]) for b, state in enumerate(state_ms)]
        parts = [
            (self.pairs, rows, [one.raw_pairs for one in known]),
            (self.users, own_rows, [one.raw_user for one in known]),
        ]
        return write_seen(parts, users)


def _rows(
    ads: NDArray[np.uint64],
    state_ms: int,
    version: int,
    vectors: NDArray[np.float32],
    worth: NDArray[np.float32] | None = None,
) -> Rows:
    times, versions = np.full(len(ads), state_ms, dtype=np.int64), np.full(len(ads), version, dtype=np.uint64)
    return Rows(ads, times, versions, vectors, worth)
