"""How the embedding store packs rows.

A value is a header and column blocks, all little-endian::

    magic 4s | codec version u1 | dtype u1 | dim u2 | count u4 | zero u4 | write sequence u8
    ads u8[n] | state_ms i8[n] | versions u8[n] | worth f2[n] | scales f4[n], int8 only | vectors f2 or i1 [n, dim]

Reader and writer share this module and its version byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint64]
I8 = npt.NDArray[np.int64]
F4 = npt.NDArray[np.float32]

CODEC_VERSION = 2
LEAST_WORTH, MOST_WORTH = 2.0**-20, 2.0**20
HEADER = struct.Struct("<4sBBHIIQ")

_MAGIC = b"SREM"
_DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {"f16": (1, np.dtype("<f2")), "int8": (2, np.dtype("i1"))}


class CodecError(ValueError):
    """A stored value that cannot be read; the message says why."""


@dataclass(frozen=True)
class Rows:
    """Embeddings of one user's pairs, one row for each ad.

    Attributes:
        ads: u8 [n].
        state_ms: i8 [n], event time of the newest event that the row depends on.
        versions: u8 [n], version of the model that made the row.
        vectors: f4 [n, dim].
        worth: f4 [n], expected gain of each row: at the bound of a user's value it decides, with the row's age, which stay.
            None = all the same.
    """

    ads: U8
    state_ms: I8
    versions: U8
    vectors: F4
    worth: F4 | None = None

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
class Block:
    """Rows as they are stored; merging never decodes, so that a vector stays bit for bit what its writer made it.

    ``worth`` is the logarithm to base 2.
    """

    ads: U8
    state_ms: I8
    versions: U8
    worth: npt.NDArray[np.float16]
    scales: F4 | None
    codes: npt.NDArray[Any]

    def columns(self) -> list[npt.NDArray[Any]]:
        """All of them, in the order of the value."""
        scales = [] if self.scales is None else [self.scales]
        return [self.ads, self.state_ms, self.versions, self.worth, *scales, self.codes]

    def take(self, index: npt.NDArray[Any]) -> Block:
        """Some of the rows."""
        scales = None if self.scales is None else self.scales[index]
        return Block(
            self.ads[index], self.state_ms[index], self.versions[index], self.worth[index], scales, self.codes[index]
        )

    def part(self, start: int, stop: int) -> Block:
        """The rows from start up to stop, without a copy."""
        scales = None if self.scales is None else self.scales[start:stop]
        cut = slice(start, stop)
        return Block(self.ads[cut], self.state_ms[cut], self.versions[cut], self.worth[cut], scales, self.codes[cut])

    @staticmethod
    def concatenate(blocks: list[Block]) -> Block:
        """All rows of blocks of one codec, one after the other."""
        columns = zip(*(block.columns() for block in blocks), strict=True)
        ads, state_ms, versions, worth, *scales, codes = (np.concatenate(column) for column in columns)
        return Block(ads, state_ms, versions, worth, scales[0] if scales else None, codes)


class Codec:
    """Packs rows of one width and dtype.

    Args:
        dim: Width of the vectors, 1 .. 65535.
        dtype: How vectors are stored: ``"f16"``, or ``"int8"`` with one scale for each row.

    Attributes:
        row_bytes: Bytes of one row.

    Raises:
        ValueError: An argument is not legal.
    """

    def __init__(self, dim: int, dtype: Literal["f16", "int8"]) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}; legal values: {', '.join(map(repr, _DTYPES))}")
        if not 1 <= dim <= 65535:
            raise ValueError(f"dim is {dim}, expected 1 to 65535")
        self.dim = dim
        self._code, self._dtype = _DTYPES[dtype]
        self._scaled = dtype == "int8"
        self.row_bytes = 3 * 8 + 2 + 4 * self._scaled + dim * self._dtype.itemsize
        self._empty = Rows.empty(dim)

    def pack(self, users: Sequence[int], rows: Sequence[Rows]) -> list[Block]:
        """Encode the rows of users, all at once: of one user's few rows each step takes as long as of a thousand.

        Raises:
            ValueError: Shapes do not fit, or a vector is not finite in the stored dtype.
        """
        for user, part in zip(users, rows, strict=True):
            num, width = len(part.ads), np.shape(part.vectors)
            lengths = {np.shape(part.ads), np.shape(part.state_ms), np.shape(part.versions)}
            if part.worth is not None:
                lengths.add(np.shape(part.worth))
            if width != (num, self.dim) or lengths != {(num,)}:
                shapes = (
                    f"ads {np.shape(part.ads)}, state_ms {np.shape(part.state_ms)}, versions {np.shape(part.versions)}"
                )
                raise ValueError(f"user {user}: {shapes}, vectors {width} do not fit n rows of dim {self.dim}")
        if not rows:
            return []
        # Each by itself: together, signed and unsigned ids would become floats.
        ads = np.concatenate([np.asarray(part.ads, np.uint64) for part in rows])
        state_ms = np.concatenate([np.asarray(part.state_ms, np.int64) for part in rows])
        versions = np.concatenate([np.asarray(part.versions, np.uint64) for part in rows])
        vectors = np.concatenate([np.asarray(part.vectors, np.float32) for part in rows])
        worth = np.concatenate([np.ones(len(part)) if part.worth is None else part.worth for part in rows])
        ends = np.cumsum([len(part) for part in rows]).tolist()
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
            at = int(np.argmin(finite))
            user = users[int(np.searchsorted(ends, at, side="right"))]
            raise ValueError(f"user {user}, ad {ads[at]}: the vector has a value that is not finite as {self._dtype}")
        log_worth = np.log2(np.fmin(np.fmax(worth, LEAST_WORTH), MOST_WORTH)).astype("<f2")  # nan is worth least
        whole = Block(ads, state_ms, versions, log_worth, scales, codes)
        return [whole.part(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def value(self, block: Block, sequence: int) -> bytes:
        """The value to store."""
        header = HEADER.pack(_MAGIC, CODEC_VERSION, self._code, self.dim, len(block.ads), 0, sequence % 2**64)
        return b"".join([header, *(column.tobytes() for column in block.columns())])

    def unpack(self, value: bytes) -> Block:
        """Read a stored value.

        Raises:
            CodecError: It is corrupt, or of another codec version, dtype or dim.
        """
        if len(value) < HEADER.size:
            raise CodecError(f"{len(value)} bytes are no header")
        magic, codec, code, dim, count, _, _ = HEADER.unpack_from(value)
        found, expected = (magic, codec, code, dim), (_MAGIC, CODEC_VERSION, self._code, self.dim)
        if found != expected:
            raise CodecError(f"(magic, codec version, dtype, dim) is {found}, expected {expected}")
        if len(value) != HEADER.size + count * self.row_bytes:
            raise CodecError(f"{len(value)} bytes do not hold {count} rows of {self.row_bytes}")
        at = HEADER.size
        ads = np.frombuffer(value, "<u8", count, at)
        state_ms = np.frombuffer(value, "<i8", count, at + 8 * count)
        versions = np.frombuffer(value, "<u8", count, at + 16 * count)
        at += 24 * count
        worth = np.frombuffer(value, "<f2", count, at)
        at += 2 * count
        scales = np.frombuffer(value, "<f4", count, at) if self._scaled else None
        at += 4 * count * self._scaled
        codes = np.frombuffer(value, self._dtype, count * dim, at).reshape(count, dim)
        return Block(ads, state_ms, versions, worth, scales, codes)

    def rows(self, block: Block) -> Rows:
        """Decode a block; columns may be read-only."""
        if block.scales is None:
            vectors = _widen(block.codes)
        else:
            vectors = block.codes.astype(np.float32)
            vectors *= block.scales[:, None]
        return Rows(block.ads, block.state_ms, block.versions, vectors)

    def none(self) -> Rows:
        """No rows."""
        return self._empty


def codec_of(value: bytes) -> Codec:
    """The codec that a stored value names.

    Raises:
        CodecError: it names none.
    """
    if len(value) < HEADER.size:
        raise CodecError(f"{len(value)} bytes are no header")
    _, _, code, dim, *_ = HEADER.unpack_from(value)
    for name, (known, _) in _DTYPES.items():
        if known == code and dim:
            return Codec(dim, "int8" if name == "int8" else "f16")
    raise CodecError(f"dtype {code} of width {dim} is unknown")


def _widen(halves: npt.NDArray[np.float16]) -> F4:
    """Turn finite f16 into f4, exactly and in a fraction of the time of ``astype``."""
    bits = halves.view(np.int16).astype(np.int32)  # the sign fills the upper half
    bits <<= 13  # the 10 bits of the mantissa to the place of the 23
    bits &= -0x70000001  # one sign bit, and an exponent of 5 bits in the place of the 8
    vectors = bits.view(np.float32)
    vectors *= np.float32(2.0**112)  # the difference of the exponents' biases, 127 - 15; right for subnormals too
    return vectors
