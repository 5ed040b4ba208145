"""The embedding store: one packed value for each user and kind, merged by event time whatever the order of its writers.

Rows are sorted by ad (`streams.codec`). Of two rows for one ad the one with the greater (state_ms, version) stays, of equals the later
written. Rows of one state and version are one computation, so the store depends on what was written and not on when or by whom. At its
bound a user's value keeps the rows of greatest expected gain, of which age takes half every `WORTH_HALF_LIFE_MS`. Rows of models that were
replaced go with the first write of their successor. The write sequence lets a writer see that another one came between its
read and its write.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import redis

from streams.codec import HEADER, I8, U8, Block, Codec, CodecError, Rows
from streams.levels import Level
from streams.log.throttle import Throttle
from streams.rows import user_key

__all__ = ["EmbeddingStore", "Rows", "StoreContentionError", "lookup", "write_seen"]

WRITE_ATTEMPTS = 32
"""Rounds of compare-and-set. One of the writers of a user wins each round, so this bounds the writers at one moment."""
WRITE_CHUNK = 256
"""Users in one round trip of a write: at 512 rows of 64 f16 some 40 MB, read and written."""
WORTH_HALF_LIFE_MS = 6 * 3_600_000
"""What a row is expected to gain halves in this time: its candidates recur less and its TTL runs out."""

# Sets all values if their headers are still what the writer read (nothing, where there was no value).
_COMPARE_AND_SET = f"""
for i = 1, #KEYS do
  if redis.call('GETRANGE', KEYS[i], 0, {HEADER.size - 1}) ~= ARGV[3 * i - 2] then return 0 end
end
for i = 1, #KEYS do redis.call('SET', KEYS[i], ARGV[3 * i - 1], 'PX', ARGV[3 * i]) end
return 1
"""

Change = tuple[str, bytes, bytes, int]
"""(key, header that was read, value, TTL in milliseconds)."""

logger = logging.getLogger(__name__)


class StoreContentionError(RuntimeError):
    """Too many writers of one user at one moment; writing again is safe."""


class EmbeddingStore:
    """Rows of one kind (such as ``"pairs"``), read in one round trip and written without locks.

    Args:
        client: A client of the server; it must not decode responses.
        kind: Names the keys ``{u:<hex>}:<kind>``.
        dim: Width of the vectors, 1 .. 65535.
        dtype: How vectors are stored: ``"f16"``, or ``"int8"`` with one scale for each row.
        max_rows: How many rows of a user are kept, which bounds the bytes of his value: ``max_rows * row_bytes`` and a header.
        ttl_ms: Age up to which a row is fresh.
        failover_ttl_ms: Age up to which a row is stale but usable. The server forgets a user that long after the last
            change; that only reclaims memory, since reading judges every row by its own age.

    Attributes:
        decode_errors: How many stored values were unreadable, and hence taken as empty.
        retired: Versions of models that were replaced; their rows are dropped from every value that is written.

    Raises:
        ValueError: An argument is not legal.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        kind: str,
        dim: int,
        dtype: Literal["f16", "int8"] = "f16",
        max_rows: int = 512,
        ttl_ms: int,
        failover_ttl_ms: int,
    ) -> None:
        self._codec = Codec(dim, dtype)
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}, expected 1 or more")
        if not 0 < ttl_ms <= failover_ttl_ms:
            raise ValueError(f"expected 0 < ttl_ms <= failover_ttl_ms, found {ttl_ms} and {failover_ttl_ms}")
        self._client = client
        self.kind, self.dim, self.max_rows = kind, dim, max_rows
        self.ttl_ms, self.failover_ttl_ms = ttl_ms, failover_ttl_ms
        self.decode_errors = 0
        self.retired: frozenset[int] = frozenset()
        self._throttle = Throttle()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._codec.row_bytes

    # Reading

    def read(self, user: int) -> Rows:
        """Read the rows of a user, sorted by ad."""
        return self.read_many([user])[0]

    def read_many(self, users: Sequence[int] | U8) -> list[Rows]:
        """Read the rows of several users in one round trip, in the order of ``users``."""
        return [self.decode(reply) for reply in self.raw_many(users)]

    def raw_many(self, users: Sequence[int] | U8) -> list[bytes | None]:
        """Read the values of several users in one round trip, for ``decode`` and for ``write_seen``."""
        pipe = self._client.pipeline(transaction=False)  # not MGET: users are of different hash slots
        for user in users:
            self.queue_read(pipe, int(user))
        return list(pipe.execute())

    def queue_read(self, pipe: Any, user: int) -> None:
        """Put the read of a user into a pipeline; ``decode`` takes the reply."""
        pipe.execute_command("GET", user_key(user, self.kind))

    def decode(self, reply: bytes | None) -> Rows:
        """Turn a stored value into rows.

        Args:
            reply: The value, or None for a user that has none.

        Returns:
            The rows, sorted by ad; columns may be read-only. A value that is corrupt, or of another codec version,
            dtype or dim, gives no rows and is counted in ``decode_errors``.
        """
        block = self._unpack(reply)
        return self._codec.none() if block is None else self._codec.rows(block)

    def decode_keys(self, reply: bytes | None) -> Rows:
        """``decode`` without the vectors, of which there are none [n, 0]: enough for ``lookup``, at a fraction of its time."""
        block = self._unpack(reply)
        if block is None:
            return self._codec.none()
        return Rows(block.ads, block.state_ms, block.versions, np.empty((len(block.ads), 0), np.float32))

    def lookup(
        self,
        rows: Rows,
        ads: U8,
        now_ms: int,
        version: int,
        ttl_ms: int | None = None,
        failover_ttl_ms: int | None = None,
    ) -> tuple[I8, npt.NDArray[np.uint8], I8]:
        """Find the usable rows of candidates: this module's ``lookup``, with the store's TTLs where none are given."""
        ttl_ms = self.ttl_ms if ttl_ms is None else ttl_ms
        failover_ttl_ms = self.failover_ttl_ms if failover_ttl_ms is None else failover_ttl_ms
        return lookup(rows, ads, now_ms, version, ttl_ms, failover_ttl_ms)

    # Writing

    def write(self, users: Sequence[int] | U8, rows: Sequence[Rows]) -> int:
        """Merge rows into what is stored; other writers may do the same at the same time.

        Args:
            users: [n] u8; a user may be named more than once.
            rows: n rows, each with vectors f4 [m, dim].

        Returns:
            How many users' values changed. Rows that are stored already, or lose against newer ones, change nothing.

        Raises:
            ValueError: Shapes do not fit, or a vector is not finite in the stored dtype; nothing is written then.
            StoreContentionError: Other writers won every round for some user; some of the users may have been written.
            redis.RedisError: The server cannot be reached; writing again is safe.
        """
        blocks = self._pack(users, rows)
        names = list(blocks)
        changed = 0
        for start in range(0, len(names), WRITE_CHUNK):
            changed += self._write({user: blocks[user] for user in names[start : start + WRITE_CHUNK]})
        return changed

    def _write(self, pending: dict[int, Block]) -> int:
        changed = 0
        for attempt in range(WRITE_ATTEMPTS):
            if attempt:
                time.sleep(random.uniform(0, 0.001 * attempt))  # losers of a round must not march in step
            replies = self.raw_many(list(pending))
            changes = {
                user: self._change(user, pending[user], reply) for user, reply in zip(pending, replies, strict=True)
            }
            written = {user: [change] for user, change in changes.items() if change is not None}
            won = _set_all(self._client, written)
            changed += sum(won)
            pending = {user: pending[user] for user, done in zip(written, won, strict=True) if not done}
            if not pending:
                return changed
        raise StoreContentionError(f"{len(pending)} users, one is {next(iter(pending))}, lost {WRITE_ATTEMPTS} rounds")

    def _pack(self, users: Sequence[int] | U8, rows: Sequence[Rows]) -> dict[int, Block]:
        """The rows of each user as one block."""
        if len(users) != len(rows):
            raise ValueError(f"{len(users)} users but {len(rows)} rows")
        filled = [(int(user), part) for user, part in zip(users, rows, strict=True) if len(part)]
        packed = self._codec.pack([user for user, _ in filled], [part for _, part in filled])
        blocks: dict[int, list[Block]] = {}
        for (user, _), block in zip(filled, packed, strict=True):
            blocks.setdefault(user, []).append(block)
        return {user: self._merge(parts) for user, parts in blocks.items()}

    def _change(self, user: int, block: Block, reply: bytes | None) -> Change | None:
        """What to set so that a block is in a user's value; None if it makes no difference."""
        stored = self._unpack(reply)
        merged = block if stored is None else self._merge([self._current(stored), block])
        sequence = 0 if stored is None or reply is None else HEADER.unpack_from(reply)[-1]
        value = self._codec.value(merged, sequence + 1)
        if stored is not None and reply is not None and value[HEADER.size :] == reply[HEADER.size :]:
            return None
        header = b"" if reply is None else reply[: HEADER.size]
        return user_key(user, self.kind), header, value, self.failover_ttl_ms

    def _current(self, block: Block) -> Block:
        """Without the rows of retired models."""
        if not self.retired:
            return block
        keep = ~np.isin(block.versions, np.fromiter(self.retired, dtype=np.uint64))
        return block if keep.all() else block.take(np.flatnonzero(keep))

    def _merge(self, blocks: list[Block]) -> Block:
        last, earlier = blocks[-1], blocks[:-1]
        in_order = _in_order(last)
        if in_order and not earlier and len(last.ads) <= self.max_rows:
            return last
        others = _others(earlier[0], last) if in_order and len(earlier) == 1 and _in_order(earlier[0]) else None
        if others is not None:  # newer rows over those that are stored
            if not len(others.ads) and len(last.ads) <= self.max_rows:
                return last
            merged = Block.concatenate([others, last])
            best = np.argsort(merged.ads, kind="stable")
        else:
            merged = Block.concatenate(blocks)
            order = np.lexsort([merged.versions, merged.state_ms, merged.ads])
            # The sort is stable: of two rows for one state the later written stays, as its writer knew all that the earlier one did.
            best = order[np.append(merged.ads[order[1:]] != merged.ads[order[:-1]], True)]
        if len(best) > self.max_rows:
            rank = merged.state_ms[best] + WORTH_HALF_LIFE_MS * merged.worth[best].astype(np.float64)
            kept = np.lexsort([merged.ads[best], rank])[-self.max_rows :]
            best = best[np.sort(kept)]
        return merged.take(best)

    def _unpack(self, reply: bytes | None) -> Block | None:
        if reply is None:
            return None
        try:
            return self._codec.unpack(reply)
        except CodecError as error:
            self._refuse(str(error))
            return None

    def _refuse(self, reason: str) -> None:
        self.decode_errors += 1
        if self._throttle.ready():
            logger.warning("store %s: unreadable value no. %d read as empty: %s", self.kind, self.decode_errors, reason)


def write_seen(
    parts: Sequence[tuple[EmbeddingStore, Sequence[Rows], Sequence[bytes | None]]], users: Sequence[int] | U8
) -> list[int]:
    """Merge rows of several kinds, computed from what was just read, each user's values in one step or not at all.

    Args:
        parts: One or more stores of one client; for each the n rows, and the n values that it held.
        users: [n] u8, distinct.

    Returns:
        Users of whom nothing was written, as another writer came between: what he wrote may be newer than what was read.

    Raises:
        ValueError: Shapes do not fit, or a vector is not finite in the stored dtype; nothing is written then.
        redis.RedisError: The server cannot be reached; some of the users may have been written.
    """
    packed = [(store, store._pack(users, rows), values) for store, rows, values in parts]
    lost: list[int] = []
    for start in range(0, len(users), WRITE_CHUNK):
        changes: dict[int, list[Change]] = {}
        for at, user in enumerate(map(int, users[start : start + WRITE_CHUNK]), start):
            made = [store._change(user, blocks[user], values[at]) for store, blocks, values in packed if user in blocks]
            changes[user] = [change for change in made if change is not None]
        written = {user: made for user, made in changes.items() if made}
        won = _set_all(parts[0][0]._client, written)
        lost += [user for user, done in zip(written, won, strict=True) if not done]
    return lost


def _set_all(client: redis.Redis, changes: dict[int, list[Change]]) -> list[int]:
    """Sets the values of users unless another writer came between; for each whether (1) or not (0)."""
    if not changes:
        return []
    pipe: Any = client.pipeline(transaction=False)
    for parts in changes.values():
        # Scripts go as text: a server that restarted or failed over does not know their hashes.
        keys, arguments = [part[0] for part in parts], [argument for part in parts for argument in part[1:]]
        pipe.execute_command("EVAL", _COMPARE_AND_SET, len(keys), *keys, *arguments)
    return list(pipe.execute())


def _in_order(block: Block) -> bool:
    return bool((block.ads[1:] > block.ads[:-1]).all())


def _others(old: Block, new: Block) -> Block | None:
    """The rows of one block whose ads another one does not have; None if it is newer for any that it has. Both are in order."""
    if not len(old.ads):
        return old
    if len(old.ads) == len(new.ads) and (old.ads == new.ads).all():  # by far the commonest: a slate computed again
        return None if _newer(old.state_ms, old.versions, new.state_ms, new.versions) else old.part(0, 0)
    at = np.minimum(np.searchsorted(old.ads, new.ads), len(old.ads) - 1)
    same = old.ads[at] == new.ads
    at = at[same]
    if _newer(old.state_ms[at], old.versions[at], new.state_ms[same], new.versions[same]):
        return None
    keep = np.ones(len(old.ads), dtype=bool)
    keep[at] = False
    return old.take(np.flatnonzero(keep))


def _newer(state_ms: I8, versions: U8, other_ms: I8, others: U8) -> bool:
    """Whether any row is newer than the one in the same place of the others."""
    return bool(((state_ms > other_ms) | ((state_ms == other_ms) & (versions > others))).any())


def lookup(
    rows: Rows, ads: U8, now_ms: int, version: int, ttl_ms: int, failover_ttl_ms: int
) -> tuple[I8, npt.NDArray[np.uint8], I8]:
    """Find the usable row of each candidate.

    A row is usable if it is of this model version, depends only on events strictly before now, and is not older than
    the failover TTL.

    Args:
        rows: n rows of one user, each ad at most once.
        ads: [m] u8, the candidates; one may stand there more than once.
        now_ms: Time of the request, epoch milliseconds.
        version: The model version to be served.
        ttl_ms: Greatest age of a fresh row.
        failover_ttl_ms: Greatest age of a stale row.

    Returns:
        The row's index i8 [m], -1 for none; the level u1 [m], ``PAIR_FRESH``, ``PAIR_STALE`` or ``NONE``; and the age
        i8 [m] in milliseconds, 0 for none.
    """
    ads = np.asarray(ads, dtype=np.uint64)  # another dtype would be compared as floats
    if not len(rows):
        return np.full(len(ads), -1), np.full(len(ads), Level.NONE, np.uint8), np.zeros(len(ads), np.int64)
    keys, order = rows.ads, None
    if not (keys[1:] > keys[:-1]).all():  # rows from the store are in order already
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
    at = np.searchsorted(keys, ads)
    at[at == len(keys)] = 0
    index = at if order is None else order[at]
    age_ms = now_ms - rows.state_ms[index]
    usable = (keys[at] == ads) & (rows.versions[index] == np.uint64(version))
    usable &= (age_ms > 0) & (age_ms <= failover_ttl_ms)
    level = np.where(age_ms <= ttl_ms, np.uint8(Level.PAIR_FRESH), np.uint8(Level.PAIR_STALE))
    level[~usable] = Level.NONE
    return np.where(usable, index, -1), level, np.where(usable, age_ms, 0)
