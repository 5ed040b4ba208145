"""`FmFeatures`: what a ranker reads of the foundation model, resolved level by level from stored rows.

Serving resolves what it fetched, and the backfill of training features resolves what the store would have held: one function, so
both see the same levels, ages and zeros.

Layouts, P = z width + K objectives + 1:
- a pair vector is `[z, logits, surface index]`, of the surface for which it was computed;
- a user vector is `[user embedding U, mean pair vector P, 1 if that mean exists]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streams.levels import Level
from streams.store import Rows, lookup

USER_ROW = 0  # the only row of a user's "user" value has this ad id
PAIRS, USER, SLATE = "pairs", "user", "slate"
DAY_MS = 86_400_000


@dataclass(frozen=True)
class FmLayout:
    """Widths of the stored vectors and the two lifetimes of a row.

    Attributes:
        z_dim: width of a compressed pair embedding.
        user_dim: width U of a user embedding.
        num_objectives: K.
        ttl_ms: up to this age a row is fresh.
        failover_ttl_ms: up to this age a row is stale, but used.
    """

    z_dim: int
    user_dim: int
    num_objectives: int
    ttl_ms: int = DAY_MS
    failover_ttl_ms: int = 3 * DAY_MS

    @property
    def pair_dim(self) -> int:
        """P."""
        return self.z_dim + self.num_objectives + 1

    @property
    def user_row_dim(self) -> int:
        """Width of a stored user row."""
        return self.user_dim + self.pair_dim + 1


@dataclass(frozen=True)
class FmFeatures:
    """Embeddings as served, for one request's m candidates or for a training table.

    Attributes:
        pair: f4[m, P - 1]; z and logits of the level that was found; zeros at levels USER and NONE.
        same_surface: f4[m]; 1 where the row was computed for the surface that asks.
        level: u1[m]; `streams.levels.Level`.
        age_ms: i8[m]; age of the row that was used; -1 at level NONE.
        user: f4[m or 1, U]; zeros where there is none.
    """

    pair: NDArray[np.float32]
    same_surface: NDArray[np.float32]
    level: NDArray[np.uint8]
    age_ms: NDArray[np.int64]
    user: NDArray[np.float32]

    @classmethod
    def none(cls, num: int, layout: FmLayout) -> FmFeatures:
        """What is read when nothing is stored, or the store is down."""
        return cls(
            pair=np.zeros((num, layout.pair_dim - 1), dtype=np.float32),
            same_surface=np.zeros(num, dtype=np.float32),
            level=np.full(num, Level.NONE, dtype=np.uint8),
            age_ms=np.full(num, -1, dtype=np.int64),
            user=np.zeros((1, layout.user_dim), dtype=np.float32),
        )


def resolve(
    pairs: Rows, user: Rows, ads: NDArray[np.uint64], surface: int, now_ms: int, version: int, layout: FmLayout
) -> FmFeatures:
    """Walks the levels for each candidate: pair (fresh, then stale), user aggregate, user, none.

    A row counts only if everything it depends on happened strictly before `now_ms` and its FM version is the one in use.

    Args:
        pairs: the user's pair rows.
        user: the user's own row, or none.
        ads: u8[m].
        surface: index of the surface that asks.
        now_ms: moment of the request.
        version: FM version in use.
        layout: widths and lifetimes.
    """
    features = FmFeatures.none(len(ads), layout)
    pair, same, level, age = features.pair, features.same_surface, features.level, features.age_ms
    own = np.array([USER_ROW], dtype=np.uint64)
    lifetimes = (layout.ttl_ms, layout.failover_ttl_ms)
    user_at, _, user_age = lookup(user, own, now_ms, version, *lifetimes)
    user_vector = features.user
    if user_at[0] >= 0:
        row = user.vectors[user_at[0]]
        user_vector = row[None, : layout.user_dim].astype(np.float32)
        aggregate, exists = row[layout.user_dim : -1], row[-1] > 0.5
        level[:] = Level.USER_AGGREGATE if exists else Level.USER
        age[:] = user_age[0]
        if exists:
            pair[:] = aggregate[:-1]
            same[:] = float(aggregate[-1] == surface)
    at, pair_level, pair_age = lookup(pairs, ads, now_ms, version, *lifetimes)
    found = at >= 0
    if found.any():
        rows = pairs.vectors[at[found]]
        pair[found] = rows[:, :-1]
        same[found] = rows[:, -1] == surface
        level[found], age[found] = pair_level[found], pair_age[found]
    return FmFeatures(pair, same, level, age, user_vector)
