from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solaris.budget import BURST_S, Cost, TokenBucket
from solaris.queue import Job, SpeculationQueue


def drained(queue: SpeculationQueue) -> list[tuple[int, float]]:
    found = []
    while (job := queue.pop()) is not None:
        found.append((job.user, job.value))
    return found


def test_best_first_and_oldest_of_equals() -> None:
    queue = SpeculationQueue(10)
    for user, value in ((1, 1.0), (2, 3.0), (3, 1.0), (4, 2.0)):
        queue.put(Job(user, value))
    assert drained(queue) == [(2, 3.0), (4, 2.0), (1, 1.0), (3, 1.0)]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=40), st.integers(1, 12))
def test_one_job_per_user_at_his_greatest_value(puts: list[tuple[int, int]], bound: int) -> None:
    queue = SpeculationQueue(bound)
    for user, value in puts:
        queue.put(Job(user, float(value)))
        assert len(queue) <= bound
    found = drained(queue)
    assert len({user for user, _ in found}) == len(found)
    assert [value for _, value in found] == sorted((value for _, value in found), reverse=True)
    if bound >= 9:
        best: dict[int, float] = {}
        for user, value in puts:
            best[user] = max(best.get(user, 0.0), value)
        assert dict(found) == best
        assert queue.dropped == 0
        assert queue.coalesced == len(puts) - len(best)


def test_a_full_queue_drops_the_lowest_value_and_counts() -> None:
    queue = SpeculationQueue(2)
    for user, value in ((1, 1.0), (2, 2.0), (3, 0.5), (4, 3.0)):
        queue.put(Job(user, value))
    assert queue.dropped == 2
    assert drained(queue) == [(4, 3.0), (2, 2.0)]
    with pytest.raises(ValueError, match="max_jobs"):
        SpeculationQueue(0)


def test_overload_does_not_grow_the_queue() -> None:
    queue = SpeculationQueue(10)
    for number in range(5_000):
        queue.put(Job(number, float(number % 97)))
    assert len(queue._best) <= 21 and len(queue._worst) <= 21
    assert len(drained(queue)) == 10


def test_waiting_counts_so_that_nobody_starves() -> None:
    now = 0.0
    queue = SpeculationQueue(100, patience_s=10.0, clock=lambda: now)
    queue.put(Job(0, 1.0))
    popped = []
    for number in range(1, 100):
        now += 1.0
        queue.put(Job(number, 20.0))
        job = queue.pop()
        assert job is not None
        popped.append(job.user)
    # ln(20) x 10 s = 30 s is what a value of 20 is ahead of a value of 1; each second one job comes and one goes.
    assert popped.index(0) in (29, 30, 31)
    assert queue.oldest_s < 2.0


def test_a_raised_job_keeps_its_age() -> None:
    now = 0.0
    queue = SpeculationQueue(10, patience_s=10.0, clock=lambda: now)
    queue.put(Job(1, 1.0))
    now = 5.0
    queue.put(Job(2, 2.0))
    queue.put(Job(1, 2.0))
    assert queue.oldest_s == 5.0
    assert [user for user, _ in drained(queue)] == [1, 2]


def test_a_user_who_triggers_without_end_gets_behind_the_others() -> None:
    now = 0.0
    queue = SpeculationQueue(100, clock=lambda: now)
    runs: dict[int, int] = {}
    for step in range(400):
        now += 0.1
        queue.put(Job(0, 3.0))  # always there, and worth more
        queue.put(Job(1 + step % 10, 1.0))
        job = queue.pop()
        assert job is not None
        runs[job.user] = runs.get(job.user, 0) + 1
    assert set(runs) == set(range(11))
    assert runs[0] < 0.35 * 400, "worth three times as much, it has about three shares of eleven or so"
    others = [runs[user] for user in range(1, 11)]
    assert max(others) - min(others) <= 3


def test_a_full_queue_counts_the_value_it_lost() -> None:
    queue = SpeculationQueue(1)
    for user, value in ((1, 1.0), (2, 2.0), (3, 0.5)):
        queue.put(Job(user, value))
    assert (queue.dropped, queue.dropped_value) == (2, 1.5)
    with pytest.raises(ValueError, match="patience_s"):
        SpeculationQueue(1, patience_s=0.0)


def test_the_bucket_grants_the_rate_and_bounds_the_burst() -> None:
    now = 0.0
    bucket = TokenBucket(100.0, clock=lambda: now)

    def spent() -> int:
        runs = 0
        while jobs := bucket.jobs(100.0, 3):
            bucket.spend(100.0 * jobs)
            runs += jobs
        return runs

    assert bucket.fill == 1.0
    assert spent() == BURST_S
    granted = 0
    for _ in range(1_000):
        now += 0.1
        granted += spent()
    assert granted == pytest.approx(100, abs=1)
    now += 1e6
    assert spent() == BURST_S, "an idle night is not saved up"


def test_a_run_larger_than_the_burst_overdraws_once() -> None:
    now = 0.0
    bucket = TokenBucket(1.0, clock=lambda: now)
    assert bucket.jobs(1e6, 64) == 1
    bucket.spend(1e6)
    assert bucket.jobs(1e-3, 64) == 0
    assert bucket.fill < 0


def test_no_budget_grants_everything_and_a_bad_one_is_refused() -> None:
    free = TokenBucket(None)
    free.spend(1e30)
    assert free.jobs(1.0, 64) == 64
    assert free.fill == 1.0
    with pytest.raises(ValueError, match="flops_per_s"):
        TokenBucket(0.0)
    assert Cost(100.0, 3.0).of(10) == 130.0
