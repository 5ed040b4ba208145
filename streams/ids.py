"""Identity: the one 64-bit hash by which users, ads and events from outside are known inside."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ExternalId = int | str
KEPT_STRINGS = 2**16  # users and ads come again and again; some 10 MB
_CANONICAL_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit integers whose outputs look uniform. Any shape."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_ints(values: NDArray[np.integer]) -> NDArray[np.uint64]:
    """`id64` of an integer array, vectorised. Any shape."""
    return mix64(values.astype(np.int64).view(np.uint64))


def id64(value: ExternalId) -> int:
    """The 64-bit identity of an external id.

    An integer is passed through SplitMix64; a string that spells an integer of at most 18 digits canonically ("5", not "05")
    is that integer, since producers differ in how they write one; any other string is BLAKE2b with 8 bytes, little-endian.

    Raises:
        TypeError: the value is neither int nor str (bool included).
        ValueError: an integer outside 64 bits, or an empty string.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"an id is an int or a str, found {type(value).__name__} {value!r}")
    if isinstance(value, str):
        if not value:
            raise ValueError("an id may not be an empty string")
        return _string_id(value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"an integer id must fit 64 bits, found {value}")
    x = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


@functools.lru_cache(KEPT_STRINGS)
def _string_id(value: str) -> int:
    if not _CANONICAL_INT.fullmatch(value) or value == "-0":
        return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
    return id64(int(value))


def ids64(values: Sequence[ExternalId]) -> NDArray[np.uint64]:
    """`id64` of each value, as u8[n]; one vectorised pass where all are integers."""
    if all(type(value) is int for value in values):
        try:
            return hash_ints(np.asarray(values, dtype=np.int64))
        except OverflowError:
            pass  # let id64 name the culprit
    return np.fromiter((id64(value) for value in values), dtype=np.uint64, count=len(values))
