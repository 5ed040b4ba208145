"""One reading process of the benchmark, on a core of its own: `python -m benchmarks.streams.child KIND ...`; prints one JSON object.

KIND is `empty` (a Faust agent that does nothing with its records), `append` (the worker without its FM: parse, user log, queue) or `fm`
(the worker as it is).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faust
import numpy as np

from kernels.host import keep_loaded, use_one_core
from solaris.app import BUFFER_RECORDS, event_loop, make_worker, serve
from solaris.app_batches import BatchWorker
from solaris.app_process import METRICS_PERIOD_S, worker_process
from solaris.app_settings import KafkaWorkerSettings
from solaris.compute import Done
from solaris.worker import TOPICS, Worker
from streams.events import ACTIVITY_TOPIC, decode_event
from streams.log import Record
from streams.log.kafka import KafkaLog

WARM_UP_SHARE = 0.2


def pin(core: int) -> None:
    """Keeps this process, and those that it starts from now on, on one core; does nothing where the system has no such call."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_setaffinity") and cores > core:
        with contextlib.suppress(OSError):  # a container may be kept from some of them
            os.sched_setaffinity(0, {core})


class WithoutFm(Worker):
    """Parses, appends and queues, but computes nothing."""

    def compute(self, users: Sequence[int]) -> Done:
        """Nothing."""
        return Done()


class Measured:
    """Notes when a worker's events were done.

    Attributes:
        ages_ms: from each event's time to its row being readable. seconds: from the first batch on.
    """

    def __init__(self, worker: BatchWorker, target: int, stop: threading.Event, fm: bool) -> None:
        self._worker, self._target, self._stop, self._fm = worker, target, stop, fm
        self.metrics, self.drain = worker.metrics, worker.drain
        self._first = 0.0
        self.count, self.seconds = 0, 0.0
        self.ages_ms: list[int] = []

    def handle(self, records: Sequence[Record]) -> None:
        """The worker's, timed."""
        self._first = self._first or time.perf_counter()
        self._worker.handle(records)
        now = time.time_ns() // 1_000_000
        events = [record for record in records if record.topic == ACTIVITY_TOPIC]
        self.count += len(events)
        self.seconds = time.perf_counter() - self._first
        if self._fm:
            self.ages_ms += [now - decode_event(record.value).time_ms for record in events]
        if self.count >= self._target:
            self._stop.set()


def worker(args: argparse.Namespace) -> dict[str, object]:
    """The app with the real handler."""
    settings = KafkaWorkerSettings(
        gem=args.models / "gem",
        autoencoder=args.models / "autoencoder",
        redis_url=args.redis,
        kafka_bootstrap_servers=args.kafka,
        kafka_partitions=args.partitions,
        slate_size=args.slate,
    )

    def make() -> Worker:
        pin(1)
        return make_worker(settings, Worker if args.kind == "fm" else WithoutFm)

    stop = threading.Event()
    with worker_process(make) as process:
        made = Measured(process, args.events, stop, args.kind == "fm")
        keep_loaded()
        serve(settings, made, KafkaLog(args.kafka), stop, group=args.group)
        time.sleep(METRICS_PERIOD_S)
        process.drain()  # the last metrics come with its reply
    ages = np.array(made.ages_ms[int(WARM_UP_SHARE * len(made.ages_ms)) :] or [0])
    done = process.metrics.registry.get_sample_value
    return {
        "events": made.count,
        "per_s": made.count / made.seconds,
        "p50_ms": float(np.percentile(ages, 50)),
        "p99_ms": float(np.percentile(ages, 99)),
        "fm_users": done("solaris_users_computed_total"),
        "fm_share": (done("solaris_compute_seconds_total") or 0.0) / made.seconds,
    }


async def empty(args: argparse.Namespace) -> dict[str, object]:
    """A Faust agent that only counts, with the app's own settings of the stream."""
    app = faust.App(
        args.group,
        broker=f"kafka://{args.kafka}",
        consumer_auto_offset_reset="earliest",
        stream_buffer_maxsize=BUFFER_RECORDS,
        stream_wait_empty=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        autodiscover=False,
        store="memory://",
    )
    topic = app.topic(
        *TOPICS, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw", acks=False
    )
    found: dict[str, Any] = {"events": 0, "first": 0.0}
    done = asyncio.Event()

    @app.agent(topic)
    async def count(stream: Any) -> Any:
        async for _ in stream.events():
            found["first"] = found["first"] or time.perf_counter()
            found["events"] += 1
            if found["events"] >= args.events:
                found["seconds"] = time.perf_counter() - found["first"]
                done.set()

    starting = asyncio.create_task(app.start())
    await done.wait()
    await app.stop()
    starting.cancel()
    return {"events": found["events"], "per_s": found["events"] / found["seconds"]}


def main() -> None:
    """Reads until the number of events is reached."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("empty", "append", "fm"))
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--slate", type=int, required=True)
    args = parser.parse_args()
    use_one_core()
    pin(0 if args.kind == "fm" else 1)
    logging.disable(logging.WARNING)
    if args.kind == "empty":
        keep_loaded()
        with asyncio.Runner(loop_factory=event_loop()) as runner:
            print(json.dumps(runner.run(empty(args))))
    else:
        print(json.dumps(worker(args)))


if __name__ == "__main__":
    main()
