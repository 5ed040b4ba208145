from __future__ import annotations

import numpy as np

from solaris.price import Price

FLOPS = 1e6


def test_no_budget_or_a_slack_one_asks_no_price() -> None:
    now = 0.0
    free, slack = Price(None), Price(1e9, lambda: now)
    for step in range(50):
        now = float(step)
        free.observe(np.ones(100, np.float32), FLOPS, 1.0)
        slack.observe(np.ones(100, np.float32), FLOPS, 1.0)
    assert free.value == slack.value == 0.0


def test_the_price_lets_pass_what_the_budget_pays_for() -> None:
    """Demand of 100 pairs a second, a budget of 20: with the bucket half full the best fifth passes, empty none, full two fifths."""
    rng = np.random.default_rng(0)
    passed = {}
    for fill in (0.0, 0.5, 1.0):
        now = 0.0
        price = Price(20 * FLOPS, lambda: now)  # noqa: B023
        for step in range(600):
            now = float(step)
            values = rng.lognormal(size=100).astype(np.float32)
            price.observe(values, FLOPS, fill)
        fresh = rng.lognormal(size=100_000)
        passed[fill] = float(np.mean(fresh / FLOPS > price.value))
    assert passed[0.0] < 0.01
    assert abs(passed[0.5] - 0.2) < 0.03
    assert abs(passed[1.0] - 0.4) < 0.04


def test_values_of_any_size_are_taken() -> None:
    now = 0.0
    price = Price(1.0, lambda: now)
    for values in ([0.0], [1e30], [1e-30], []):
        now += 2.0
        price.observe(np.array(values, dtype=np.float32), FLOPS, 0.5)
        assert np.isfinite(price.value)
        assert price.value >= 0
