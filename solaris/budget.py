"""The budget of FM work: a token bucket in FLOPs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST_S = 10.0  # unused budget of at most this long may be spent at once


@dataclass(frozen=True)
class Cost:
    """FLOPs of the two halves of the FM: f_R once per user and run, f_C once per pair."""

    request_flops: float
    pair_flops: float

    def of(self, num_pairs: int) -> float:
        """FLOPs of one user's job."""
        return self.request_flops + num_pairs * self.pair_flops


class TokenBucket:
    """Grants work at a rate.

    Args:
        flops_per_s: rate; None grants everything.
        clock: seconds, monotonic.
    """

    def __init__(self, flops_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if flops_per_s is not None and flops_per_s <= 0:
            raise ValueError(f"flops_per_s must be positive, found {flops_per_s}")
        self.flops_per_s, self._clock = flops_per_s, clock
        self._tokens = 0.0 if flops_per_s is None else flops_per_s * BURST_S
        self._then = clock()

    def jobs(self, flops: float, most: int) -> int:
        """How many jobs of a cost may run together now, at most `most`; the last may overdraw, so that none is too large for ever."""
        if self.flops_per_s is None:
            return most
        return min(most, max(math.ceil(self._filled() / flops), 0))

    @property
    def fill(self) -> float:
        """Share of the burst that is left; negative when overdrawn, 1 without a bound."""
        return 1.0 if self.flops_per_s is None else self._filled() / (self.flops_per_s * BURST_S)

    def spend(self, flops: float) -> None:
        """Takes the cost of a run."""
        if self.flops_per_s is not None:
            self._tokens = self._filled() - flops

    def _filled(self) -> float:
        rate = self.flops_per_s or 0.0
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._then) * rate, rate * BURST_S)
        self._then = now
        return self._tokens
