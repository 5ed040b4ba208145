from __future__ import annotations

import numpy as np
import pytest

from solaris import outlook
from solaris.outlook import DAY_MS, HOUR_MS, Outlook, RateTable, Returns, Slate, Trends
from streams.levels import Level

START_MS = 1_650_000_000_000


def slate(ads: list[int], *, logits: float = 0.0, level: int = 0, time_ms: int = START_MS) -> Slate:
    num = len(ads)
    return Slate(
        ads=np.array(ads, dtype=np.uint64),
        ranks=np.arange(num),
        logits=np.full(num, logits),
        levels=np.full(num, level),
        surface=0,
        time_ms=time_ms,
    )


def test_a_rate_moves_from_its_prior_to_what_is_seen_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RateTable(2, strength=10.0)
    assert table.mean(np.array([0, 1]), 0.5).tolist() == [0.5, 0.5]
    table.add(np.zeros(90, np.int64), np.ones(90))
    assert table.mean(0, 0.5) == pytest.approx((90 + 5) / 100)
    assert table.mean(1, 0.5) == 0.5, "cells are apart"
    monkeypatch.setattr(outlook, "MEMORY", 100.0)
    for _ in range(200):
        table.add(np.zeros(50, np.int64), np.zeros(50))
    assert table.mean(0, 0.5) < 0.1, "what was seen first counts no more"


def test_expected_returns_are_calibrated() -> None:
    """Users of two kinds, who come every 30 minutes or every 30 hours: learned returns within a day equal the true ones."""
    rng = np.random.default_rng(0)
    returns = Returns(DAY_MS)
    times: list[tuple[int, int]] = []
    for user in range(300):
        gap = 30 * HOUR_MS if user % 10 else HOUR_MS // 2
        now = START_MS + int(rng.integers(0, DAY_MS))
        while now < START_MS + 8 * DAY_MS:
            times.append((now, user))
            now += int(gap * rng.uniform(0.5, 1.5))
    predictions, outcomes = [], []
    by_user: dict[int, list[int]] = {}
    for now, user in times:
        by_user.setdefault(user, []).append(now)
    for now, user in sorted(times):
        returns.observe(user, now)
        if START_MS + 4 * DAY_MS < now < START_MS + 7 * DAY_MS:
            true = sum(now < later <= now + DAY_MS for later in by_user[user])
            predictions.append(returns.expect(user))
            outcomes.append(true)
    often = np.array(outcomes) > 10
    assert np.mean(np.array(predictions)[often]) == pytest.approx(np.mean(np.array(outcomes)[often]), rel=0.1)
    assert np.mean(np.array(predictions)[~often]) == pytest.approx(np.mean(np.array(outcomes)[~often]), abs=0.1)


def test_returns_learn_of_those_who_never_come_back() -> None:
    returns = Returns(DAY_MS)
    for user in range(500):
        returns.observe(user, START_MS + user)
    before = returns.expect(0)
    returns.observe(10_000, START_MS + 3 * DAY_MS)  # time passes
    assert returns.expect(0) < 0.1 * before


def test_a_request_again_or_late_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "MAX_USERS", 3)
    monkeypatch.setattr(outlook, "MAX_PENDING", 5)
    returns = Returns(DAY_MS)
    returns.observe(1, START_MS)
    expected = returns.expect(1)
    for time_ms in (START_MS, START_MS - HOUR_MS):
        returns.observe(1, time_ms)
    assert returns.expect(1) == expected
    for user in range(2, 50):
        returns.observe(user, START_MS + user)
    assert len(returns._users) == 3
    assert len(returns._pending) == 5


def test_trends_tell_rising_from_falling() -> None:
    trends = Trends()
    steady, rising, falling = (np.array([ad], dtype=np.uint64) for ad in (1, 2, 3))
    for hour in range(72):
        now = START_MS + hour * HOUR_MS
        for _ in range(10):
            trends.observe(steady, now)
            if hour >= 69:
                trends.observe(rising, now)
            if hour < 66:
                trends.observe(falling, now)
    assert trends.of(np.array([1, 2, 3, 4], dtype=np.uint64)).tolist() == [1, 2, 0, 1]


def test_persistence_and_gain_come_from_what_is_asked_again() -> None:
    learned = Outlook(DAY_MS)
    ads = list(range(1, 201))
    for _ in range(60):
        # The best 25 of 200 are asked for again, those without a row move by 1, those with one by .1.
        learned.learn(slate(ads, level=Level.NONE), slate(ads[:25], logits=1.0, level=Level.PAIR_FRESH))
        learned.learn(slate(ads, level=Level.PAIR_FRESH), slate(ads[:25], logits=0.1, level=Level.PAIR_FRESH))
        learned.learn(slate(ads, level=Level.NONE), slate(ads[:25], logits=0.1, level=Level.NONE))
    asked = learned.persistence(slate(ads))
    assert asked[:25].min() > 0.9
    assert asked[50:].max() < 0.05
    gains = learned.gains()
    assert gains[Level.NONE] == pytest.approx(1.0 - 0.01, rel=0.3), "what moves anyway is no gain"
    assert gains[Level.NONE] > 10 * gains[Level.PAIR_FRESH]


def test_an_empty_slate_teaches_nothing() -> None:
    learned = Outlook(DAY_MS)
    learned.learn(slate([]), slate([1]))
    assert learned.persistence(slate([1])).tolist() == [outlook.PERSISTENCE_PRIOR]
    assert (np.diff(learned.gains()) <= 0).all(), "at first a worse level is worth more to replace"
