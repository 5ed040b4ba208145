"""Real workers on a genuine broker, in processes that may be killed, and the final state that they have to reach."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import redis
import torch
from kafka import KafkaAdminClient

from loopfm.represent import Representer
from solaris.app import serve
from solaris.app_process import die_with_parent, worker_process
from solaris.app_settings import KafkaWorkerSettings
from solaris.speculator import SLATE_DIM
from solaris.worker import TOPICS, Worker, WorkerConfig
from streams.events import ACTIVITY_TOPIC, encode_event
from streams.features import PAIRS, SLATE, USER, store_of
from streams.log import REJECTED_SUFFIX, ActivityLog, LogUnavailable, Record
from streams.log.kafka import KafkaLog
from streams.log.kafka_client import topic_specs
from streams.log.kafka_consumer import next_offsets
from streams.requests import SERVED_TOPIC, encode_served
from streams.rows import LOG_ROW
from streams.store import EmbeddingStore, Rows
from streams.tools import event_of
from tests.kafka_broker import Broker
from tests.solaris.test_worker import NUM_ADS, served
from tests.system import System

DEADLINE_S = 240.0
"""A guard: nothing is decided by it. Above the time in which a stalled consumer is found and started again."""
PARTITIONS = 4
ALL_TOPICS = (*TOPICS, *(topic + REJECTED_SUFFIX for topic in TOPICS))
DELIVERIES, IN_HAND = "test:deliveries", "test:in-hand"
YEAR_MS = 366 * 86_400_000

# Its server imports everything once: a worker that is started again is there at once, as one that a platform keeps warm.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])

Place = tuple[str, int]


def wait_until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def fresh_log(broker: Broker) -> KafkaLog:
    """A log whose topics, with the names of production, are empty. Only for a broker that the tests have started."""
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    admin.delete_topics([topic for topic in ALL_TOPICS if topic in admin.list_topics()])
    wait_until(lambda: not set(ALL_TOPICS) & set(admin.list_topics()))
    admin.close()
    log = KafkaLog(broker.address)
    log.ensure_topics(topic_specs(PARTITIONS))
    return log


class Group:
    """What the broker says of a group; each question is asked until it answers.

    Args:
        address: of the broker.
        name: of the group.
    """

    def __init__(self, address: str, name: str) -> None:
        self._address, self._name, self._log = address, name, KafkaLog(address)

    def positions(self) -> dict[Place, tuple[int, int]]:
        """(committed, newest) of each partition of the two topics."""
        while True:
            try:
                found = {topic: self._log.positions(topic, self._name) for topic in TOPICS}
                return {(topic, part): ends for topic in TOPICS for part, ends in found[topic].items()}
            except LogUnavailable:
                time.sleep(0.1)

    def caught_up(self) -> bool:
        """Whether all is committed."""
        return all(reached == newest for reached, newest in self.positions().values())

    def members(self) -> int:
        """How many share the partitions; 0 while they are being shared out."""
        admin = KafkaAdminClient(bootstrap_servers=self._address)
        try:
            found = admin.describe_groups([self._name])[self._name]
        finally:
            admin.close()
        return len(found["members"]) if found["group_state"] == "Stable" else 0

    def close(self) -> None:
        self._log.close()


@dataclass(frozen=True)
class WorkerPlace:
    """What a worker process has to know.

    Attributes:
        ports: of the health endpoints of workers, by name.
        pause_s: how long a worker rests before the work of a batch and before its commit, so that a kill comes there too.
    """

    kafka: str
    url: str
    folder: Path
    group: str
    ports: dict[str, int] = field(default_factory=dict)
    pause_s: float = 0.0


class Observed(Worker):
    """The worker, leaving a trace of what it is handed over, which outlives its process."""

    def __init__(
        self, client: redis.Redis, log: ActivityLog, representer: Representer, name: str, pause_s: float
    ) -> None:
        super().__init__(client, log, representer, WorkerConfig(slate_size=NUM_ADS))
        self._trace, self._name, self._pause_s = client, name, pause_s

    def handle(self, records: Sequence[Record]) -> None:
        pipe: Any = self._trace.pipeline(transaction=False)
        places = [[topic, partition, offset] for (topic, partition), offset in next_offsets(records).items()]
        pipe.hset(IN_HAND, self._name, json.dumps(places))
        for record in records:
            pipe.hincrby(DELIVERIES, f"{record.topic}:{record.offset}", 1)
        pipe.execute()
        time.sleep(self._pause_s)
        super().handle(records)
        time.sleep(self._pause_s)


def settings_of(place: WorkerPlace, name: str) -> KafkaWorkerSettings:
    return KafkaWorkerSettings(
        gem=place.folder / "gem",
        autoencoder=place.folder / "autoencoder",
        redis_url=place.url,
        consumer=name,
        kafka_bootstrap_servers=place.kafka,
        kafka_partitions=PARTITIONS,
        health_port=place.ports.get(name),
    )


def work(place: WorkerPlace, name: str) -> None:
    """The process of one worker, which has its handler in another one."""
    die_with_parent()  # the server of these processes, which ends with the tests

    def observed() -> Worker:
        log, client = KafkaLog(place.kafka), redis.Redis.from_url(place.url)
        representer = Representer.load(place.folder / "gem", place.folder / "autoencoder")
        return Observed(client, log, representer, name, place.pause_s)

    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with worker_process(observed) as worker:
        sys.exit(serve(settings_of(place, name), worker, KafkaLog(place.kafka), stop, group=place.group))


class Fleet:
    """Workers of one group, under the rule of their platform: what ends is started again.

    Attributes:
        kills: how many workers were killed.
        in_hand: kills that hit a worker between taking records and committing them.
        crashes: exit codes of workers that ended by themselves.
    """

    def __init__(self, place: WorkerPlace, names: Sequence[str]) -> None:
        self.group = Group(place.kafka, place.group)
        self._place, self._client = place, redis.Redis.from_url(place.url)
        self.kills, self.in_hand, self.crashes = 0, 0, list[int]()
        self._away = set[str]()
        self._processes = {name: self._start(name) for name in names}

    @property
    def names(self) -> list[str]:
        return list(self._processes)

    def kill(self, name: str, *, broker_away: bool = False, replace: bool = True) -> None:
        """SIGKILL; and another process takes the worker's place at once, or with `restore`."""
        process = self._processes[name]
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            self.supervise()  # it had ended by itself, just before
            return
        self.kills += 1
        self.in_hand += not broker_away and self._was_in_hand(name)  # else nobody can tell
        if replace:
            self._processes[name] = self._start(name)
        else:
            self._away.add(name)

    def restore(self) -> None:
        """Starts what was killed and not replaced."""
        for name in self._away:
            self._processes[name] = self._start(name)
        self._away.clear()

    def supervise(self) -> None:
        """Starts what has ended by itself."""
        for name, process in self._processes.items():
            if process.exitcode is not None and name not in self._away:
                self.crashes.append(process.exitcode)
                self._processes[name] = self._start(name)

    def handed_over(self, records: Iterable[tuple[str, int, int]]) -> bool:
        """Whether workers were handed all these records: topic, partition, offset."""
        pipe: Any = self._client.pipeline(transaction=False)
        for topic, partition, offset in records:
            pipe.hexists(DELIVERIES, f"{topic}:{partition}:{offset}")
        return all(pipe.execute())

    def stop(self) -> list[int | None]:
        """Ends all in order; returns their exit codes."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(DEADLINE_S)
        return [process.exitcode for process in self._processes.values()]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        self.group.close()

    def _start(self, name: str) -> Any:
        self._client.hdel(IN_HAND, name)
        process = PROCESSES.Process(target=work, args=(self._place, name), name=name)
        process.start()
        return process

    def _was_in_hand(self, name: str) -> bool:
        taken: Any = self._client.hget(IN_HAND, name)
        if taken is None:
            return False
        reached = {place: at for place, (at, _) in self.group.positions().items()}
        return any(reached[topic, partition] < offset for topic, partition, offset in json.loads(taken))


# Traffic


def pair(system: System, number: int) -> tuple[str, bytes, bytes]:
    """(key, served request, its impression) of one impression of the log; after its end the log comes again, years later."""
    round_, index = divmod(number, len(system.dataset.rows))
    request, event = served(system, index), event_of(system.dataset, index)
    if round_:
        later = event.time_ms + round_ * YEAR_MS
        request = msgspec.structs.replace(request, time_ms=later)
        event = msgspec.structs.replace(event, event_id=number, time_ms=later)
    return f"{int(system.dataset.users[index]):016x}", encode_served(request), encode_event(event)


def publish_pairs(log: ActivityLog, pairs: Sequence[tuple[str, bytes, bytes]]) -> None:
    log.publish_many(SERVED_TOPIC, [(key, request) for key, request, _ in pairs])
    log.publish_many(ACTIVITY_TOPIC, [(key, event) for key, _, event in pairs])


def handled(worker: Worker, pairs: Sequence[tuple[str, bytes, bytes]], chunk: int = 100) -> None:
    """What an undisturbed worker makes of the same records, in their order."""
    for start in range(0, len(pairs), chunk):
        part = pairs[start : start + chunk]
        records = [Record(SERVED_TOPIC, key, request, f"0:{start}") for key, request, _ in part]
        worker.handle(records + [Record(ACTIVITY_TOPIC, key, event, f"0:{start}") for key, _, event in part])


def redelivered(client: redis.Redis) -> tuple[int, int]:
    """(records that were handed over, further times that some of them were)."""
    counts: Any = client.hvals(DELIVERIES)
    return len(counts), sum(int(count) - 1 for count in counts)


# State


@dataclass(frozen=True)
class UserState:
    """What is stored of one user. `pairs` are the rows of the slate's ads, `others` those of ads that left the slate."""

    log: list[bytes]
    slate: Rows
    user: Rows
    pairs: Rows
    others: Rows


def final_state(client: redis.Redis, system: System) -> dict[str, UserState]:
    """The state of each user, by his key."""
    layout = system.representer.layout
    slates = EmbeddingStore(client, kind=SLATE, dim=SLATE_DIM, ttl_ms=1, failover_ttl_ms=1)
    stores = {SLATE: slates, USER: store_of(client, USER, layout), PAIRS: store_of(client, PAIRS, layout)}
    keys: Any = client.keys("{u:*")
    found = {}
    for name in sorted({key.decode().split(":")[1].rstrip("}") for key in keys}):
        rows = {kind: store.read(int(name, 16)) for kind, store in stores.items()}
        events: Any = client.zrange(f"{{u:{name}}}:log", 0, -1)
        held = np.isin(rows[PAIRS].ads, rows[SLATE].ads)
        found[name] = UserState(events, rows[SLATE], rows[USER], _take(rows[PAIRS], held), _take(rows[PAIRS], ~held))
    return found


def _take(rows: Rows, chosen: Any) -> Rows:
    return Rows(rows.ads[chosen], rows.state_ms[chosen], rows.versions[chosen], rows.vectors[chosen])


def assert_same_state(found: dict[str, UserState], wanted: dict[str, UserState]) -> None:
    """Logs, slates, rows of the users and of the ads in their slates are equal.

    Rows of ads that have left a slate keep the state of the last job that held them, which depends on how records met in
    batches; of them only so much is promised, that none knows more than the log.
    """
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        two = wanted[name]
        assert one.log == two.log, name
        newest_ms = int(np.frombuffer(one.log[-1], LOG_ROW)["time_ms"][0])
        for kind, mine, other in (
            ("slate", one.slate, two.slate),
            ("user", one.user, two.user),
            ("pairs", one.pairs, two.pairs),
        ):
            for column in ("ads", "state_ms", "versions"):
                assert np.array_equal(getattr(mine, column), getattr(other, column)), (name, kind, column)
            assert_within_one_step(mine.vectors, other.vectors, f"{name} {kind}")
        assert len(one.user) == 1 and len(one.pairs) == len(one.slate), name
        assert np.all(one.pairs.state_ms == newest_ms) and np.all(one.others.state_ms <= newest_ms), name


def assert_within_one_step(one: Any, two: Any, name: str) -> None:
    """Equal to one step of f16, of which numbers near zero have finer ones than the sums before them."""
    step = np.maximum(np.abs(one), np.abs(two)).clip(2.0**-10) * 2.0**-10
    assert np.all(np.abs(one - two) <= step), (name, float(np.abs(one - two).max()))


def assert_events_once_in_order(state: Iterable[UserState], num_events: int) -> None:
    """Every event is in one log once, and each log is in order of event time."""
    logs = [user.log for user in state]
    for log in logs:
        assert np.all(np.diff(np.frombuffer(b"".join(log), LOG_ROW)["time_ms"]) >= 0)
    members = [member for log in logs for member in log]
    assert len(members) == num_events == len({member[:8] for member in members})
