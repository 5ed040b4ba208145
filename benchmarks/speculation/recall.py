"""How often a really shown ad had a fresh pair row, when the K best pairs of a user are computed after each of his requests.

This asks more of a policy than pair coverage: it must find ads, not keep candidates. Ads are ranked for the user at his request, by the
popularity of the hours before and his affinity, for the surface on which he is; the next request's shown ad is looked up among the
rows that the last one, or any within the TTL, left behind. At most K pairs are computed at a request, those with a live row left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from solaris.trace import DAY_MS, NONE, Trace


def shown_against_pairs(trace: Trace, sizes: tuple[int, ...], ttl_ms: int = DAY_MS) -> dict[str, dict[str, float]]:
    """Per K: share of shown ads found."""
    return {}
