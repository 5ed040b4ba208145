"""What a FLOP must bring: the price at which the demand for FM work meets the budget.

A price beats spending whatever the bucket holds: the users worth most do not all come first. It is the quantile of recent values per FLOP
above which lies as much work as the budget pays for, steered by how full the bucket is. The simulator's twin in event time is
`solaris.simulate_price`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from solaris.demand import Demand

NUM_BINS = 400
LOW, HIGH = 1e-18, 1e3  # values per FLOP that are told apart
MEMORY_S = 3_600.0  # half-life of the demand that is remembered
EVERY_S = 1.0  # the price is set anew this often


class Price:
    """Price of a FLOP in expected gain.

    Args:
        flops_per_s: the budget; None = everything is free.
        clock: seconds, monotonic.

    Attributes:
        value: the price now; 0 while the budget pays for all that is asked.
    """

    def __init__(self, flops_per_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.value = 0.0
        self._flops_per_s, self._clock = flops_per_s, clock
        self._demand = Demand(LOW, HIGH, NUM_BINS)
        self._start = self._then = clock()

    def observe(self, values: NDArray[np.float32], flops: float, fill: float) -> None:
        """Takes note of work that was asked for, and now and then sets the price.

        Args:
            values: f4[n], expected gain of each pair, bought or not.
            flops: cost of each.
            fill: share of the bucket that is full; overdrawn, it is negative.
        """
        if self._flops_per_s is None:
            return
        self._demand.add(values / flops, flops)
        now = self._clock()
        if now - self._then >= EVERY_S:
            self._set(now, fill)
            self._demand.keep(0.5 ** ((now - self._then) / MEMORY_S))
            self._then = now

    def _set(self, now: float, fill: float) -> None:
        seconds = MEMORY_S / np.log(2) * (1 - 0.5 ** ((now - self._start) / MEMORY_S))
        # Half full is where the bucket should stand; full, twice the rate may be spent, and empty, nothing.
        wanted = (self._flops_per_s or 0.0) * float(np.clip(2 * fill, 0.0, 2.0)) * seconds
        self.value = self._demand.price(wanted)
