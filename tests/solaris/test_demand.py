"""The value above which lies as much as can be paid for."""

from __future__ import annotations

import numpy as np
import pytest

from solaris.demand import Demand


def test_the_price_parts_what_is_bought_from_the_rest() -> None:
    values = np.random.default_rng(0).lognormal(size=10_000)
    demand = Demand(1e-6, 1e6, 400)
    demand.add(values, 2.0)
    for share in (0.01, 0.1, 0.5, 0.9):
        price = demand.price(2.0 * 10_000 * share)
        assert np.mean(values > price) == pytest.approx(share, abs=0.003)
    assert demand.price(20_000) == 0, "all of it can be had"
    demand.keep(0.5)
    assert np.mean(values > demand.price(1_000)) == pytest.approx(0.1, abs=0.003)


def test_values_beyond_the_range_count_at_its_ends() -> None:
    demand = Demand(0.1, 10.0, 10)
    demand.add(np.array([0.0, 1e9, 1e9]))
    assert 1.0 < demand.price(2.0 - 1e-6) < 10.0 + 1e-6
    assert demand.price(2.5) < 0.2
