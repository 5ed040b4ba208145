"""Throughput and latency of the worker path: `python -m benchmarks.streams [--quick]`.

Two cores are used: one for what is measured, one for broker, store and producer. Of a worker with its FM, the first is for its handler and
for the store, which only works while the handler waits for it; what reads Kafka is on the other one.
The parts on Kafka need a distribution at KAFKA_HOME, of which each of them starts a broker of its own.
Reported, medians over interleaved rounds with least and greatest:
- handlers: events/s of `Worker.handle` in batches, user-log append included, without the FM;
- append: the same through Kafka and Faust; empty: a Faust agent that does nothing, in the same run;
- fm: with the FM of the tests (width 16, two layers, slates of 32 ads), from an event's time to its rows being readable, at steady rates of
  events of 1,000 users who come at random: nearly each event is a run of the FM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.results import append_rows
from benchmarks.streams.child import WithoutFm, pin
from gem.examples import RequestLog
from kernels.host import use_one_core
from solaris.worker import WorkerConfig
from streams.dataset import load_dataset
from streams.embedded import EmbeddedValkey
from streams.events import ACTIVITY_TOPIC, ActivityEvent, encode_event
from streams.ids import id64
from streams.log import Record
from streams.log.kafka import KafkaLog
from streams.log.kafka_client import topic_specs
from streams.log.valkey import ValkeyLog
from streams.requests import SERVED_TOPIC, ServedRequest, encode_served
from tests.kafka_broker import Broker
from tests.system import System, build

PARTITIONS, BATCH, SLATE, USERS = 4, 512, 32, 1_000
RATES_PER_S, LINGER_S, IDLE_S = (250, 500, 1_000), 0.02, 1.0
MINI = Path(__file__).parents[2] / "data" / "kuairand" / "mini"


def now_ms() -> int:
    """Epoch milliseconds."""
    return time.time_ns() // 1_000_000


@contextmanager
def broker_of(home: Path) -> Iterator[tuple[str, KafkaLog]]:
    """A broker with empty topics."""
    broker = Broker(home)
    try:
        broker.start()
        log = KafkaLog(broker.address)
        log.ensure_topics(topic_specs(PARTITIONS))
        yield broker.address, log
        log.close()
    finally:
        broker.close()


@contextmanager
def store_on(core: int) -> Iterator[EmbeddedValkey]:
    """An empty store on a core, for which this process leaves its own, the first one, for a moment."""
    pin(core)
    with EmbeddedValkey(appendonly=False) as server:
        pin(0)
        yield server


class Traffic:
    """Events of users who come at random, and their requests. Synthetic in who comes when; ads and surfaces are the log's."""

    def __init__(self, system: System) -> None:
        self._rng = np.random.default_rng(0)
        self._ads = system.dataset.raw_ads
        self._known = np.fromiter(self._ads, dtype=np.uint64)
        self._raw = list(self._ads.values())
        self._surfaces = system.dataset.schema.surfaces
        self._run = uuid.uuid4().hex[:8]
        self._number = 0

    def events(self, times_ms: Sequence[int]) -> list[tuple[str, bytes]]:
        """(key, event) of random users at these times."""
        found, num = [], len(times_ms)
        users, ads = self._rng.integers(0, USERS, num), self._rng.integers(0, len(self._raw), num)
        for user, ad, time_ms in zip(users, ads, times_ms, strict=True):
            self._number += 1
            event = ActivityEvent(
                event_id=f"{self._run}-{self._number}",
                user_id=f"user-{user}",
                ad_id=self._raw[ad],
                surface=self._surfaces[int(user) % len(self._surfaces)],
                time_ms=time_ms,
            )
            found.append((event.user_id, encode_event(event)))
        return found

    def requests(self) -> list[tuple[str, bytes]]:
        """(key, served request) of each user."""
        now = now_ms() - 60_000
        found = []
        for user in range(USERS):
            served = ServedRequest(
                request_id=f"{self._run}-{user}",
                user=id64(f"user-{user}"),
                surface=user % len(self._surfaces),
                time_ms=now,
                ads=self._rng.choice(self._known, SLATE, replace=False).tolist(),
                scores=[0.1] * SLATE,
                levels=[0] * SLATE,
                ages_ms=[-1] * SLATE,
                variant="ranker",
                model="m",
                fm_version=1,
                degraded=False,
            )
            found.append((f"user-{user}", encode_served(served)))
        return found


def handlers(system: System, server: EmbeddedValkey, traffic: Traffic, num: int) -> float:
    """Events/s of the handler in batches."""
    client = server.client()
    client.flushall()
    worker = WithoutFm(client, ValkeyLog(client), system.representer, WorkerConfig(slate_size=SLATE))
    records = [Record(ACTIVITY_TOPIC, key, value, "0") for key, value in traffic.events([now_ms()] * num)]
    start = time.perf_counter()
    for at in range(0, num, BATCH):
        worker.handle(records[at : at + BATCH])
    return num / (time.perf_counter() - start)


class Reader:
    """Starts reading processes on one broker."""

    def __init__(self, kafka: str, server: EmbeddedValkey, models: Path) -> None:
        self._kafka, self._server, self._models = kafka, server, models

    def start(self, kind: str, group: str, events: int) -> subprocess.Popen[bytes]:
        """A process that ends once it has read so many events."""
        command = [sys.executable, "-m", "benchmarks.streams.child", kind, "--kafka", self._kafka]
        command += ["--redis", self._server.url, "--models", str(self._models), "--group", group]
        command += ["--events", str(events), "--partitions", str(PARTITIONS), "--slate", str(SLATE)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def read(self, kind: str, group: str, events: int) -> dict[str, float]:
        """What such a process measured."""
        return self.result(self.start(kind, group, events))

    @staticmethod
    def result(process: subprocess.Popen[bytes]) -> dict[str, float]:
        """Waits for a process."""
        out, _ = process.communicate(timeout=300)
        if process.returncode:
            raise SystemExit(f"a reading process ended with code {process.returncode}")
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        return found


def latency(log: KafkaLog, reader: Reader, traffic: Traffic, seconds: float, rate: int) -> dict[str, float]:
    """Publishes at a steady rate to a worker that has every user's slate."""
    log.publish_many(SERVED_TOPIC, traffic.requests())
    group = f"latency-{uuid.uuid4().hex[:8]}"
    total = int(seconds * rate)
    process = reader.start("fm", group, total)
    while log.lag(SERVED_TOPIC, group) and process.poll() is None:
        time.sleep(0.1)
    time.sleep(IDLE_S)
    start_ms, sent = now_ms(), 0
    while sent < total:
        due = min((now_ms() - start_ms) * rate // 1_000, total)
        if due > sent:
            log.publish_many(ACTIVITY_TOPIC, traffic.events([start_ms + i * 1_000 // rate for i in range(sent, due)]))
            sent = due
        time.sleep(LINGER_S)
    return reader.result(process)


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    args = parser.parse_args()
    use_one_core()
    pin(0)
    rounds, num, seconds = (3, 20_000, 15.0) if args.quick else (5, 40_000, 30.0)
    rows: list[dict[str, object]] = []

    def note(name: str, values: list[float], unit: str) -> float:
        row = {"measure": name, "median": float(np.median(values)), "least": min(values), "greatest": max(values)}
        rows.append(row | {"unit": unit})
        print(f"{name:28s}{row['median']:10.2f} {unit:10s} ({row['least']:.2f} to {row['greatest']:.2f})", flush=True)
        return float(np.median(values))

    with tempfile.TemporaryDirectory() as folder, store_on(0) as server:
        dataset = load_dataset(MINI)
        system = build(Path(folder), dataset, RequestLog.of(dataset))
        traffic = Traffic(system)
        summary: dict[str, object] = {"benchmark": "streams"}
        speeds = [handlers(system, server, traffic, num) for _ in range(rounds)]
        summary["handlers_per_s"] = note("handlers", speeds, "events/s")
        home = os.environ.get("KAFKA_HOME")
        if home:
            with broker_of(Path(home)) as (address, log):
                reader = Reader(address, server, Path(folder))
                log.publish_many(ACTIVITY_TOPIC, traffic.events([now_ms()] * num))
                found: dict[str, list[float]] = {"append": [], "empty": []}
                for number in range(rounds):
                    for kind, values in found.items():
                        server.client().flushall()  # known events would be cheaper
                        values.append(reader.read(kind, f"{kind}-{number}", num)["per_s"])
            summary["append_per_s"] = note("append through Faust", found["append"], "events/s")
            summary["empty_per_s"] = note("empty Faust agent", found["empty"], "events/s")
            ratios = [a / b for a, b in zip(found["append"], found["empty"], strict=True)]
            summary["append_of_empty"] = note("append / empty", ratios, "ratio")
            for rate in RATES_PER_S:
                runs = []
                for _ in range(1 if args.quick else 3):
                    with broker_of(Path(home)) as (address, log), store_on(1) as own:
                        runs.append(latency(log, Reader(address, own, Path(folder)), traffic, seconds, rate))
                for quantile in ("p50", "p99"):
                    median = note(f"event to row, {quantile}, {rate}/s", [r[f"{quantile}_ms"] for r in runs], "ms")
                    summary[f"event_to_row_{quantile}_ms_at_{rate}"] = median
                note(f"FM users / event, {rate}/s", [r["fm_users"] / r["events"] for r in runs], "ratio")
                note(f"FM and store, share, {rate}/s", [r["fm_share"] for r in runs], "ratio")
        else:
            print("KAFKA_HOME names no Kafka distribution: the parts on Kafka are left out")
        append_rows("streams", rows)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
