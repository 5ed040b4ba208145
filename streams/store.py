"""The embedding store: one packed value for each user and kind, merged by event time whatever the order of its writers.

A value is a header and column blocks, all little-endian::

    magic 4s | codec version u1 | dtype u1 | dim u2 | count u4 | zero u4 | write sequence u8
    ads u8[n] | state_ms i8[n] | versions u8[n] | scales f4[n], int8 only | vectors f2 or i1 [n, dim]

Rows are sorted by ad. Of two rows for one ad the one with the greater (state_ms, version) stays, of equals the later
written, and a user keeps the rows with the greatest (state_ms, ad). Rows of one state and version are one computation, so
the store depends on what was written and not on when or by whom. The write sequence lets a writer see that another one
came between its read and its write.
"""

from __future__ import annotations

import logging
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import redis

from streams.levels import Level
from streams.log.throttle import Throttle
from streams.rows import user_key

U8 = npt.NDArray[np.uint64]
I8 = npt.NDArray[np.int64]
F4 = npt.NDArray[np.float32]

CODEC_VERSION = 1
WRITE_ATTEMPTS = 32
"""Rounds of compare-and-set. One of the writers of a user wins each round, so this bounds the writers at one moment."""
WRITE_CHUNK = 256
"""Users in one round trip of a write: at 512 rows of 64 f16 some 40 MB, read and written."""

_MAGIC = b"SREM"
_HEADER = struct.Struct("<4sBBHIIQ")
_DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {"f16": (1, np.dtype("<f2")), "int8": (2, np.dtype("i1"))}
# Sets the value if its header is still what the writer read (nothing, where there was no value).
_COMPARE_AND_SET = f"""
if redis.call('GETRANGE', KEYS[1], 0, {_HEADER.size - 1}) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""

logger = logging.getLogger(__name__)


class StoreContentionError(RuntimeError):
    """Too many writers of one user at one moment; writing again is safe."""


@dataclass(frozen=True)
class Rows:
    """Embeddings of one user's pairs, one row for each ad.

    Attributes:
        ads: u8 [n].
        state_ms: i8 [n], event time of the newest event that the row depends on.
        versions: u8 [n], version of the model that made the row.
        vectors: f4 [n, dim].
    """

    ads: U8
    state_ms: I8
    versions: U8
    vectors: F4

    def __len__(self) -> int:
        return len(self.ads)

    @classmethod
    def empty(cls, dim: int) -> Self:
        """Make rows of no ad.

        Args:
            dim: Width of the vectors.
        """
        ids, times = np.empty(0, np.uint64), np.empty(0, np.int64)
        return cls(ids, times, ids, np.empty((0, dim), np.float32))


@dataclass(frozen=True)
class _Block:
    """Rows as they are stored; merging never decodes, so that a vector stays bit for bit what its writer made it."""

    ads: U8
    state_ms: I8
    versions: U8
    scales: F4 | None
    codes: npt.NDArray[Any]

    def columns(self) -> list[npt.NDArray[Any]]:
        scales = [] if self.scales is None else [self.scales]
        return [self.ads, self.state_ms, self.versions, *scales, self.codes]

    def take(self, index: npt.NDArray[Any]) -> _Block:
        scales = None if self.scales is None else self.scales[index]
        return _Block(self.ads[index], self.state_ms[index], self.versions[index], scales, self.codes[index])


class EmbeddingStore:
    """Rows of one kind (such as ``"pairs"``), read in one round trip and written without locks.

    Args:
        client: A client of the server; it must not decode responses.
        kind: Names the keys ``{u:<hex>}:<kind>``.
        dim: Width of the vectors, 1 .. 65535.
        dtype: How vectors are stored: ``"f16"``, or ``"int8"`` with one scale for each row.
        max_rows: How many rows of a user are kept.
        ttl_ms: Age up to which a row is fresh.
        failover_ttl_ms: Age up to which a row is stale but usable. The server forgets a user that long after the last
            change; that only reclaims memory, since reading judges every row by its own age.

    Attributes:
        decode_errors: How many stored values were unreadable, and hence taken as empty.

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
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}; legal values: {', '.join(map(repr, _DTYPES))}")
        if not 1 <= dim <= 65535:
            raise ValueError(f"dim is {dim}, expected 1 to 65535")
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}, expected 1 or more")
        if not 0 < ttl_ms <= failover_ttl_ms:
            raise ValueError(f"expected 0 < ttl_ms <= failover_ttl_ms, found {ttl_ms} and {failover_ttl_ms}")
        self._client = client
        self.kind, self.dim, self.max_rows = kind, dim, max_rows
        self.ttl_ms, self.failover_ttl_ms = ttl_ms, failover_ttl_ms
        self.decode_errors = 0
        self._code, self._dtype = _DTYPES[dtype]
        self._scaled = dtype == "int8"
        self._row_bytes = 3 * 8 + 4 * self._scaled + dim * self._dtype.itemsize
        self._empty = Rows.empty(dim)
        self._throttle = Throttle()

    # Reading

    def read(self, user: int) -> Rows:
        """Read the rows of a user, sorted by ad."""
        return self.read_many([user])[0]

    def read_many(self, users: Sequence[int] | U8) -> list[Rows]:
        """Read the rows of several users in one round trip, in the order of ``users``."""
        return [self.decode(reply) for reply in self._get(users)]

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
        if block is None:
            return self._empty
        if block.scales is None:
            vectors = _widen(block.codes)
        else:
            vectors = block.codes.astype(np.float32)
            vectors *= block.scales[:, None]
        return Rows(block.ads, block.state_ms, block.versions, vectors)

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
        if len(users) != len(rows):
            raise ValueError(f"{len(users)} users but {len(rows)} rows")
        blocks: dict[int, list[_Block]] = {}
        for user, part in zip(users, rows, strict=True):
            if len(part):
                blocks.setdefault(int(user), []).append(self._pack(int(user), part))
        pending = {user: self._merge(parts) for user, parts in blocks.items()}
        names = list(pending)
        changed = 0
        for start in range(0, len(names), WRITE_CHUNK):
            changed += self._write({user: pending[user] for user in names[start : start + WRITE_CHUNK]})
        return changed

    def _write(self, pending: dict[int, _Block]) -> int:
        changed = 0
        for attempt in range(WRITE_ATTEMPTS):
            if attempt:
                time.sleep(random.uniform(0, 0.001 * attempt))  # losers of a round must not march in step
            # Scripts go as text: a server that restarted or failed over does not know their hashes.
            pipe: Any = self._client.pipeline(transaction=False)
            written = []
            for user, reply in zip(pending, self._get(pending), strict=True):
                stored = self._unpack(reply)
                merged = pending[user] if stored is None else self._merge([stored, pending[user]])
                sequence = 0 if stored is None or reply is None else _HEADER.unpack_from(reply)[-1]
                value = self._value(merged, sequence + 1)
                if stored is not None and reply is not None and value[_HEADER.size :] == reply[_HEADER.size :]:
                    continue
                header = b"" if reply is None else reply[: _HEADER.size]
                key = user_key(user, self.kind)
                pipe.execute_command("EVAL", _COMPARE_AND_SET, 1, key, header, value, self.failover_ttl_ms)
                written.append(user)
            won: list[int] = pipe.execute() if written else []
            changed += sum(won)
            pending = {user: pending[user] for user, done in zip(written, won, strict=True) if not done}
            if not pending:
                return changed
        raise StoreContentionError(f"{len(pending)} users, one is {next(iter(pending))}, lost {WRITE_ATTEMPTS} rounds")

    def _get(self, users: Any) -> list[bytes | None]:
        pipe = self._client.pipeline(transaction=False)  # not MGET: users are of different hash slots
        for user in users:
            self.queue_read(pipe, user)
        return list(pipe.execute())

    def _merge(self, blocks: Sequence[_Block]) -> _Block:
        columns = zip(*(block.columns() for block in blocks), strict=True)
        ads, state_ms, versions, *scales, codes = (np.concatenate(column) for column in columns)
        merged = _Block(ads, state_ms, versions, scales[0] if scales else None, codes)
        keys = [versions, state_ms, ads]
        order = np.lexsort(keys)
        # The sort is stable: of two rows for one state the later written stays, since its writer knew all that the earlier one did.
        last = np.append(ads[order[1:]] != ads[order[:-1]], True)
        best = order[last]
        if len(best) > self.max_rows:
            newest = np.lexsort([ads[best], state_ms[best]])[-self.max_rows :]
            best = best[np.sort(newest)]
        return merged.take(best)

    # The codec

    def _pack(self, user: int, rows: Rows) -> _Block:
        ads, state_ms = np.asarray(rows.ads, np.uint64), np.asarray(rows.state_ms, np.int64)
        versions, vectors = np.asarray(rows.versions, np.uint64), np.asarray(rows.vectors, np.float32)
        if vectors.shape != (len(ads), self.dim) or not ads.shape == state_ms.shape == versions.shape == (len(ads),):
            shapes = f"ads {ads.shape}, state_ms {state_ms.shape}, versions {versions.shape}, vectors {vectors.shape}"
            raise ValueError(f"user {user}: {shapes} do not fit n rows of dim {self.dim}")
        scales = None
        if self._scaled:
            scales = np.abs(vectors).max(axis=1) / np.float32(127)
            finite = np.isfinite(scales)
            scaled = (finite & (scales > 0))[:, None]
            units = np.divide(vectors, scales[:, None], out=np.zeros_like(vectors), where=scaled)
            codes = np.rint(units).clip(-127, 127).astype(np.int8)
        else:
            with np.errstate(over="ignore"):
                codes = vectors.astype(self._dtype)
            finite = np.isfinite(codes).all(axis=1)
        if not finite.all():
            ad = ads[np.argmin(finite)]
            raise ValueError(f"user {user}, ad {ad}: the vector has a value that is not finite as {self._dtype}")
        return _Block(ads, state_ms, versions, scales, codes)

    def _value(self, block: _Block, sequence: int) -> bytes:
        header = _HEADER.pack(_MAGIC, CODEC_VERSION, self._code, self.dim, len(block.ads), 0, sequence % 2**64)
        return b"".join([header, *(column.tobytes() for column in block.columns())])

    def _unpack(self, value: bytes | None) -> _Block | None:
        if value is None:
            return None
        if len(value) < _HEADER.size:
            self._refuse(f"{len(value)} bytes are no header")
            return None
        magic, codec, code, dim, count, _, _ = _HEADER.unpack_from(value)
        found, expected = (magic, codec, code, dim), (_MAGIC, CODEC_VERSION, self._code, self.dim)
        if found != expected:
            self._refuse(f"(magic, codec version, dtype, dim) is {found}, expected {expected}")
            return None
        if len(value) != _HEADER.size + count * self._row_bytes:
            self._refuse(f"{len(value)} bytes do not hold {count} rows of {self._row_bytes}")
            return None
        at = _HEADER.size
        ads = np.frombuffer(value, "<u8", count, at)
        state_ms = np.frombuffer(value, "<i8", count, at + 8 * count)
        versions = np.frombuffer(value, "<u8", count, at + 16 * count)
        at += 24 * count
        scales = np.frombuffer(value, "<f4", count, at) if self._scaled else None
        at += 4 * count * self._scaled
        codes = np.frombuffer(value, self._dtype, count * dim, at).reshape(count, dim)
        return _Block(ads, state_ms, versions, scales, codes)

    def _refuse(self, reason: str) -> None:
        self.decode_errors += 1
        if self._throttle.ready():
            logger.warning("store %s: unreadable value no. %d read as empty: %s", self.kind, self.decode_errors, reason)


def _widen(halves: npt.NDArray[np.float16]) -> F4:
    """Turn finite f16 into f4, exactly and in a fraction of the time of ``astype``."""
    bits = halves.view(np.int16).astype(np.int32)  # the sign fills the upper half
    bits <<= 13  # the 10 bits of the mantissa to the place of the 23
    bits &= -0x70000001  # one sign bit, and an exponent of 5 bits in the place of the 8
    vectors = bits.view(np.float32)
    vectors *= np.float32(2.0**112)  # the difference of the exponents' biases, 127 - 15; right for subnormals too
    return vectors


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
