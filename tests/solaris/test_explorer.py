from __future__ import annotations

import numpy as np
import pytest

from solaris import explorer
from solaris.explorer import HOUR_MS, Explorer
from solaris.outlook import RISING_RANK, SIMILAR_RANK, Outlook, Slate
from streams.embedded import EmbeddedValkey
from streams.events import ACTIVITY_TOPIC
from streams.features import PAIRS, USER, store_of
from streams.log import Record
from tests.solaris.test_outlook import START_MS, slate
from tests.solaris.test_worker import NUM_ADS, traffic
from tests.system import System

DIM = 8
HOUR = START_MS // HOUR_MS * HOUR_MS


def vector(*values: float) -> np.ndarray:
    return np.array([*values, *[0.0] * (DIM - len(values))], dtype=np.float32)


def test_rising_ads_are_those_asked_for_more_than_before() -> None:
    found = Explorer(10, DIM)
    for _ in range(60):  # the hour before: ad 1 much, ad 2 as much as later
        found.observe(slate([1, 2], time_ms=HOUR))
    for _ in range(60):
        found.observe(slate([2, 3], time_ms=HOUR + HOUR_MS))
    for _ in range(3):
        found.observe(slate([4], time_ms=HOUR + HOUR_MS))
    found.observe(slate([9], time_ms=HOUR))  # late: of an hour that is over
    own = slate([7, 8], time_ms=HOUR + HOUR_MS)
    wider = found.propose(5, own, None, HOUR + 2 * HOUR_MS - 1)
    assert wider.ads.tolist() == [7, 8, 3], "new and much asked; not what is steady, falling or rare"
    assert wider.ranks.tolist() == [0, 1, RISING_RANK]
    assert wider.explored.tolist() == [False, False, True]
    known = found.propose(5, slate([3], time_ms=HOUR + HOUR_MS), None, HOUR + 2 * HOUR_MS - 1)
    assert known.ads.tolist() == [3], "what is in the slate is not proposed again"


def test_similar_users_propose_what_they_were_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "NEIGHBOURS", 2)
    found = Explorer(3, DIM)
    found.remember(1, vector(1.0), slate([10, 11]))
    found.remember(2, vector(0.9, 0.1), slate([11, 12]))
    found.remember(3, vector(0.0, 1.0), slate([20]))
    found.remember(4, vector(-1.0), slate([30]))
    wider = found.propose(5, slate([10]), vector(2.0), START_MS)
    assert wider.ads.tolist() == [10, 11, 12], "both neighbours' first; nothing of those who are unlike"
    assert wider.ranks.tolist() == [0, SIMILAR_RANK, SIMILAR_RANK]
    own = found.propose(1, slate([99]), vector(1.0), START_MS)
    assert own.ads.tolist() == [99, 11, 12], "a user is not his own neighbour"
    assert found.propose(5, slate([]), vector(2.0), START_MS).ads.tolist() == []
    assert found.propose(5, slate([10]), None, START_MS).ads.tolist() == [10]
    none = Explorer(0, DIM)
    assert none.propose(5, slate([10]), vector(2.0), START_MS).ads.tolist() == [10]
    with pytest.raises(ValueError, match="explore_pairs"):
        Explorer(-1, DIM)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explorer, "RING", 4)
    monkeypatch.setattr(explorer, "MAX_COUNTED", 50)
    found = Explorer(4, DIM)
    for user in range(40):
        found.remember(user, vector(1.0, user), slate([user]))
        found.remember(user, vector(1.0, user), slate([user]))
        found.observe(slate(list(range(10 * user, 10 * user + 10))))
    assert len(found._slots) == 4
    assert sorted(found._slots) == [36, 37, 38, 39]
    assert sum(len(counts) for counts in found._now.values()) <= 60


def test_the_worth_of_explored_ads_is_learned() -> None:
    learned = Outlook(HOUR_MS)
    wide = Slate(
        ads=np.array([1, 2, 3], dtype=np.uint64),
        ranks=np.array([0, SIMILAR_RANK, RISING_RANK]),
        logits=np.zeros(3),
        levels=np.zeros(3, dtype=np.int64),
        surface=0,
        time_ms=START_MS,
    )
    before = learned.persistence(wide)
    assert before[1] == before[2] < before[0]
    gains = learned.gains()
    for _ in range(200):
        learned.learn(wide, slate([3], logits=5.0))
    after = learned.persistence(wide)
    assert after[2] > 0.7
    assert after[1] < before[1]
    np.testing.assert_array_equal(learned.gains(), gains), "an ad without a score before has none that moved"


def test_a_worker_explores_and_leaves_the_rest_as_it_is(system: System, store: EmbeddedValkey) -> None:
    client = store.client()
    records = [Record(*record, "0") for record in traffic(system, 60)]
    layout = system.representer.layout
    users = [int(key, 16) for key in {record.key for record in records}]
    found = {}
    for pairs in (0, 6):
        client.flushall()
        worker = system.worker(client, slate_size=NUM_ADS, explore_pairs=pairs)
        for start in range(0, len(records), 20):
            worker.handle(records[start : start + 20])
        worker.handle(
            [record for record in records if record.topic == ACTIVITY_TOPIC]
        )  # all again, now with neighbours
        rows = dict(zip(users, store_of(client, PAIRS, layout).read_many(users), strict=True))
        own = dict(zip(users, store_of(client, USER, layout).read_many(users), strict=True))
        found[pairs] = rows, own
    plain, wide = found[0][0], found[6][0]
    assert all(set(plain[user].ads.tolist()) <= set(wide[user].ads.tolist()) for user in users)
    assert sum(len(wide[user]) for user in users) > sum(len(plain[user]) for user in users)
    for user in users:
        at = np.isin(wide[user].ads, plain[user].ads)
        same = (
            wide[user].state_ms[at] == plain[user].state_ms
        )  # an ad that left the slate may come back as an explored one
        np.testing.assert_allclose(wide[user].vectors[at][same], plain[user].vectors[same], atol=4e-3)
        np.testing.assert_allclose(found[6][1][user].vectors, found[0][1][user].vectors, atol=4e-3)
