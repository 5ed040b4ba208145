"""The price of an inference, found online so that the spend ends at the budget without looking ahead.

A price beats spending whatever the ledger holds: the users worth most do not all come first. The price is the quantile of recent values
above which lies as much as the budget buys, nudged by what the ledger has saved or lacks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solaris.demand import Demand
from solaris.trace import DAY_MS, HOUR_MS

NUM_BINS = 398
LOW, HIGH = 1e-5, 1e3  # expected uses that are told apart
MEMORY_MS = (
    DAY_MS  # half-life of the values remembered: a whole day, so that the hour of the day does not move the price
)
EVERY_MS = HOUR_MS // 6  # the price is set anew this often
RESERVE = 0.005  # share of a day's budget kept in the ledger, so that good moments never find it empty
PULL_DAYS = 0.08  # the ledger is steered back to the reserve over this long


class Price:
    """Price of one inference in expected uses.

    Args:
        budget: inferences per requested pair.
    """

    def __init__(self, budget: float) -> None:
        self.value = 0.0
        self._budget = budget
        self._demand = Demand(LOW, HIGH, NUM_BINS)
        self._requested = 0.0
        self._since_ms: int | None = None
        self._clock_ms = 0

    def observe(self, now_ms: int, values: NDArray[np.float32], requested: int, ledger: float) -> None:
        """Takes note of a trigger's proposals and, now and then, sets the price.

        Args:
            now_ms: moment.
            values: f4[n] of the proposals, whether bought or not.
            requested: pairs that the trigger's request asked for.
            ledger: inferences saved so far.
        """
        self._demand.add(values[values > LOW])
        self._requested += requested
        if self._since_ms is None:
            self._since_ms = self._clock_ms = now_ms
        elapsed = now_ms - self._clock_ms
        if elapsed >= EVERY_MS:
            self._set(ledger, now_ms)
            keep = 0.5 ** (elapsed / MEMORY_MS)
            self._demand.keep(keep)
            self._requested *= keep
            self._clock_ms = now_ms

    def _set(self, ledger: float, now_ms: int) -> None:
        # what the decayed memory holds of a day's requests
        seen_days = (1 - 0.5 ** ((now_ms - (self._since_ms or 0)) / MEMORY_MS)) * MEMORY_MS / DAY_MS / np.log(2)
        per_day = self._requested / max(seen_days, 1e-6)
        spare = (ledger - RESERVE * self._budget * per_day) / max(per_day * PULL_DAYS, 1e-9)
        share = float(np.clip(self._budget + spare, 0.2 * self._budget, 3 * self._budget))
        self.value = self._demand.price(share * self._requested)
