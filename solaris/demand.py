"""How much was asked for at which value, and the value above which lies as much as can be paid for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Demand:
    """Decaying amounts by value, in bins of equal ratio; within a bin they are taken as evenly spread.

    Args:
        low, high: values that are told apart; what lies outside goes to the first or the last bin.
        num_bins: between them.
    """

    def __init__(self, low: float, high: float, num_bins: int) -> None:
        self._low, self._log_low = low, float(np.log(low))
        self._step = float(np.log(high / low)) / num_bins
        self._mass = np.zeros(num_bins)

    def add(self, values: NDArray[np.floating], amount: float = 1.0) -> None:
        """Takes note of an amount at each of the values f4[n]."""
        bins = ((np.log(np.maximum(values, self._low)) - self._log_low) / self._step).astype(np.int64)
        num = len(self._mass)
        self._mass += amount * np.bincount(np.minimum(bins, num - 1), minlength=num)

    def keep(self, share: float) -> None:
        """Forgets all but a share."""
        self._mass *= share

    def price(self, wanted: float) -> float:
        """The value above which lies the wanted amount; 0 if all that was asked for is no more than that."""
        above = np.cumsum(self._mass[::-1])[::-1]
        if above[0] <= wanted:
            return 0.0
        bin_ = int(np.searchsorted(-above, -wanted, side="left"))  # the first above which no more lies than is wanted
        part = (above[bin_ - 1] - wanted) / self._mass[bin_ - 1]  # of the bin below, what is not bought
        return float(np.exp(self._log_low + self._step * (bin_ - 1 + part)))
