"""Workers and the broker are killed at random while events flow: nothing is lost, and the state is that of an undisturbed run.

`--kills` and `--broker-restarts` make the run as long as one likes.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import pytest

from streams.embedded import EmbeddedValkey
from streams.log import LogUnavailable
from streams.log.kafka import KafkaLog
from streams.log.kafka_consumer import SESSION_TIMEOUT_MS
from tests.kafka_broker import Broker
from tests.solaris.kafka_system import (
    DEADLINE_S,
    Fleet,
    WorkerPlace,
    assert_events_once_in_order,
    assert_same_state,
    final_state,
    fresh_log,
    handled,
    pair,
    publish_pairs,
    redelivered,
    wait_until,
)
from tests.solaris.test_worker import NUM_ADS
from tests.system import System

SEED = 7
NAMES = ("one", "two")
PRODUCE_EVERY_S, PRODUCE_MOST = 0.05, 8
"""Some 90 requests and as many events a second, in chunks of 1 to 8."""
PAUSE_S = 0.04
"""Of a worker twice in a batch, so that it has work in hand most of the time."""
TAKEOVER_S = SESSION_TIMEOUT_MS / 1000 + 5
"""Within this others should work on all partitions of a worker that was killed in a settled group. It is told and decides nothing, as
two busy cores may well be slower. A worker that dies while it joins is still in the next generation, and only then begins the session
in which it is missed: one session more."""


class Producer:
    """Publishes requests and their impressions until it is told to stop, over any outage of the broker.

    Attributes:
        published: all that is in the log for certain.
    """

    def __init__(self, log: KafkaLog, system: System) -> None:
        self.published: list[tuple[str, bytes, bytes]] = []
        self._log, self._system, self._rng = log, system, random.Random(SEED)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(PRODUCE_EVERY_S):
                first = len(self.published)
                last = first + self._rng.randint(1, PRODUCE_MOST)
                self._publish([pair(self._system, number) for number in range(first, last)])

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _publish(self, pairs: list[tuple[str, bytes, bytes]]) -> None:
        while True:
            try:
                publish_pairs(self._log, pairs)
            except LogUnavailable:
                time.sleep(0.1)  # and the same again: some of them will be in the log twice
            else:
                self.published += pairs
                return


class Chaos:
    """Kills workers and the broker at times of its own.

    Attributes:
        takeovers_s: after each kill in a settled group, seconds until the survivor worked on all partitions.
    """

    def __init__(self, fleet: Fleet, broker: Broker) -> None:
        self.takeovers_s: list[float] = []
        self._fleet, self._broker, self._rng = fleet, broker, random.Random(SEED)

    def run(self, kills: int, restarts: int) -> None:
        """Half of the kills come soon after another, among starts and rebalances, half in a settled group."""
        before = {round((kills + 1) * (i + 1) / (restarts + 1)) - 1 for i in range(restarts)}
        at_work = False
        for kill in range(kills):
            if kill in before:
                self._restart_broker()
                at_work = False
            hasty = self._rng.random() < 0.5
            if not hasty:
                if not at_work:
                    self._takeover(DEADLINE_S)
                wait_until(self._all_in_group)
            time.sleep(self._rng.uniform(0, 1))
            # Where it is measured, the survivor is alone: a worker that starts again makes a rebalance of its own.
            self._fleet.kill(self._rng.choice(NAMES), replace=hasty)
            seconds = self._takeover(self._rng.uniform(0, 3) if hasty else DEADLINE_S)
            self._fleet.restore()
            at_work = not hasty
            if seconds is not None and not hasty:
                self.takeovers_s.append(seconds)

    def _restart_broker(self) -> None:
        self._broker.kill()
        time.sleep(self._rng.uniform(0, 1))
        if self._rng.random() < 0.5:
            self._fleet.kill(self._rng.choice(NAMES), broker_away=True)
        self._broker.start()

    def _all_in_group(self) -> bool:
        self._fleet.supervise()
        return self._fleet.group.members() == len(NAMES)

    def _takeover(self, most_s: float) -> float | None:
        """Seconds until some worker has a record of each partition in hand that is newer than now; None if it takes longer."""
        started_s = time.monotonic()
        next_ = [(*place, newest) for place, (_, newest) in self._fleet.group.positions().items()]
        while time.monotonic() < started_s + most_s:
            self._fleet.supervise()
            if self._fleet.handed_over(next_):
                return time.monotonic() - started_s
            time.sleep(0.05)
        if most_s >= DEADLINE_S:
            group, missing = self._fleet.group, [one for one in next_ if not self._fleet.handed_over([one])]
            pytest.fail(
                f"partitions without a worker: {missing}; positions {group.positions()}, {group.members()} members, "
                f"{len(self._fleet.crashes)} crashes"
            )
        return None


def test_workers_and_broker_may_be_killed_at_any_time(
    system: System, store: EmbeddedValkey, broker: Broker, unique: str, pytestconfig: pytest.Config
) -> None:
    kills, restarts = pytestconfig.getoption("kills"), pytestconfig.getoption("broker_restarts")
    client, started_s = store.client(), time.monotonic()
    with fresh_log(broker) as log, KafkaLog(broker.address) as producing:
        producer = Producer(producing, system)
        fleet = Fleet(WorkerPlace(broker.address, store.url, system.folder, unique, pause_s=PAUSE_S), NAMES)
        chaos = Chaos(fleet, broker)
        try:
            with producer.running():
                wait_until(lambda: redelivered(client)[0] > 0)
                chaos.run(kills, restarts)
            wait_until(fleet.group.caught_up)
            codes = fleet.stop()
        finally:
            fleet.close()
        rejected = sum(log.published(f"{topic}.rejected") for topic in ("activity", "served"))
    found = final_state(client, system)
    records, again = redelivered(client)
    sys.stdout.write(
        f"{time.monotonic() - started_s:.0f} s, {len(producer.published)} requests; {fleet.kills} kills, {fleet.in_hand} of them with "
        f"work in hand; {restarts} broker restarts, {len(fleet.crashes)} crashes; {records} records, {again} handed over again; "
        f"takeovers: {_figures(chaos.takeovers_s)}\n"
    )
    assert_events_once_in_order(found.values(), len(producer.published))
    client.flushall()
    handled(system.worker(client, slate_size=NUM_ADS), producer.published)
    assert_same_state(found, final_state(client, system))
    assert (codes, rejected) == ([0, 0], 0)
    # A worker that loses the broker in the middle of its start ends with code 1, to be started again.
    assert fleet.crashes == [1] * len(fleet.crashes) and len(fleet.crashes) <= restarts * len(NAMES)
    assert fleet.kills + len(fleet.crashes) >= kills


def _figures(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    late = sum(one > TAKEOVER_S for one in seconds)
    return f"{len(seconds)}, median {median(seconds):.1f} s, max {max(seconds):.1f} s, {late} above {TAKEOVER_S:.0f} s"
