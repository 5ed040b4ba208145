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
import redis
from numpy.typing import NDArray

from streams.levels import Level
from streams.store import EmbeddingStore, Rows, lookup

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
    """Embeddings as served, for m candidates of one request or of many.

    Attributes:
        pair: f4[m, P - 1]; z and logits of the level that was found; zeros at levels USER and NONE.
        same_surface: f4[m]; 1 where the row was computed for the surface that asks.
        level: u1[m]; `streams.levels.Level`.
        age_ms: i8[m]; age of the row that was used; -1 at level NONE.
        user: f4[r, U]; the user embedding, zeros where there is none; r = 1 for one request, r = m for many.
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
    pair: NDArray[np.float32],
    pair_age_ms: NDArray[np.int64],
    user: NDArray[np.float32],
    user_age_ms: NDArray[np.int64],
    surface: NDArray[np.int64] | int,
    layout: FmLayout,
) -> FmFeatures:
    """Walks the levels for each candidate: pair (fresh, then stale), user aggregate, user, none.

    Args:
        pair: f4[m, P]; pair vectors; anything where there is no row.
        pair_age_ms: i8[m]; age of the row, -1 where there is none. Ages of 0 (the row may know the request's own moment) and
            ages above the failover TTL count as none.
        user: f4[r, U + P + 1]; user vectors, r = 1 or m.
        user_age_ms: i8[r]; the same for user rows.
        surface: index of the surface that asks, or i8[m].
        layout: widths and lifetimes.
    """
    has_pair = (pair_age_ms > 0) & (pair_age_ms <= layout.failover_ttl_ms)
    has_user = (user_age_ms > 0) & (user_age_ms <= layout.failover_ttl_ms)
    has_aggregate = has_user & (user[:, -1] > 0.5)
    from_user = np.where(has_aggregate, Level.USER_AGGREGATE, np.where(has_user, Level.USER, Level.NONE))
    from_pair = np.where(pair_age_ms <= layout.ttl_ms, Level.PAIR_FRESH, Level.PAIR_STALE)
    aggregate = user[:, layout.user_dim : -1]
    vector = np.where(has_pair[:, None], pair, np.where(has_aggregate[:, None], aggregate, 0.0))
    return FmFeatures(
        pair=vector[:, :-1].astype(np.float32),
        same_surface=((has_pair | has_aggregate) & (vector[:, -1] == surface)).astype(np.float32),
        level=np.where(has_pair, from_pair, from_user).astype(np.uint8),
        age_ms=np.where(has_pair, pair_age_ms, np.where(has_user, user_age_ms, -1)),
        user=np.where(has_user[:, None], user[:, : layout.user_dim], 0.0).astype(np.float32),
    )


def resolve_rows(
    pairs: Rows, user: Rows, ads: NDArray[np.uint64], surface: int, now_ms: int, version: int, layout: FmLayout
) -> FmFeatures:
    """`resolve` for one request, from the rows of its user as the store gave them.

    Args:
        pairs: the user's pair rows. user: the user's own row, or none.
        ads: u8[m]. surface: index of the surface that asks. now_ms: moment of the request.
        version: FM version in use; rows of another one count as none.
        layout: widths and lifetimes.
    """
    lifetimes = (layout.ttl_ms, layout.failover_ttl_ms)
    at, _, age = lookup(pairs, ads, now_ms, version, *lifetimes)
    user_at, _, user_age = lookup(user, np.array([USER_ROW], dtype=np.uint64), now_ms, version, *lifetimes)
    pair_vector = pairs.vectors[at] if len(pairs) else np.zeros((len(ads), layout.pair_dim), np.float32)
    user_vector = user.vectors[user_at] if len(user) else np.zeros((1, layout.user_row_dim), np.float32)
    return resolve(
        pair_vector, np.where(at >= 0, age, -1), user_vector, np.where(user_at >= 0, user_age, -1), surface, layout
    )


def store_of(client: redis.Redis, kind: str, layout: FmLayout, *, max_rows: int = 1) -> EmbeddingStore:
    """The store of pair rows (`PAIRS`) or user rows (`USER`), as workers write and rankers read it.

    Args:
        client: of the server. kind: `PAIRS` or `USER`. layout: widths and lifetimes.
        max_rows: rows that a writer keeps of a user; a reader need not say.
    """
    dim = layout.pair_dim if kind == PAIRS else layout.user_row_dim
    return EmbeddingStore(
        client, kind=kind, dim=dim, max_rows=max_rows, ttl_ms=layout.ttl_ms, failover_ttl_ms=layout.failover_ttl_ms
    )
