"""At most one log line a minute for what repeats."""

from __future__ import annotations

import threading
import time

LOG_PERIOD_S = 60.0
"""A fault that lasts is worth one line a minute: enough to see that it lasts, too little to fill a disk."""


class Throttle:
    """Says whether it is time for another line.

    Args:
        period_s: Least time between two lines.
    """

    def __init__(self, period_s: float = LOG_PERIOD_S) -> None:
        self._period_s = period_s
        self._next_s = 0.0
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Tell whether a line may be written now; if so, the next may be one period later."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._next_s:
                return False
            self._next_s = now_s + self._period_s
            return True
