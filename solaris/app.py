"""A Solaris worker on Kafka: a Faust app reads the topics, and `Worker.handle` is the same as in the embedded mode.

What is promised, and how:
- At least once: offsets are committed after the handler has returned (`app_batches`). State is in the store, Faust has no tables.
- The order of a user: his records are in one partition, a partition has one worker, and a worker has one batch in hand. That is also
  the bound of its concurrency; more of it is more workers, up to the number of partitions.
- No order between topics beyond a batch, where served records come first. A slate that arrives after the events that follow it is a
  trigger itself, so the newest rows are the same in any order.
- A broker or a store that is away is waited for, before the start and later, with /ready at 503 and one log line a minute.
- The handler has a process of its own (`app_process`, ADR 7): the event loop keeps its session whatever the FM does.
- Supervised restart is the platform's: if the agent crashes, the handler's process ends, or the consumer has stalled for
  `RESTART_LIMIT_S` with nothing in hand, the process ends with code 1, and whoever started it starts it again; SIGTERM ends it with
  code 0. A handler that never returns holds the process until it is killed, which loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import faust
import redis
from mode.supervisors import CrashingSupervisor
from redis.backoff import NoBackoff
from redis.retry import Retry

from kernels.host import keep_loaded, use_one_core
from loopfm.represent import Representer
from solaris.app_batches import Batches, BatchWorker
from solaris.app_health import health_server
from solaris.app_process import worker_process
from solaris.app_settings import KafkaWorkerSettings
from solaris.app_watch import RESTART_LIMIT_S, Watch
from solaris.worker import GROUP, TOPICS, Worker
from streams.log.delivery import Delivery
from streams.log.kafka import KafkaLog
from streams.log.kafka_client import KafkaSecurity, servers, topic_specs
from streams.log.kafka_consumer import HEARTBEAT_MS, MAX_POLL_INTERVAL_MS, METADATA_AGE_MS, SESSION_TIMEOUT_MS

BUFFER_RECORDS = 2_048
"""Records read ahead while the handler works: a few batches, so that memory is bounded."""
REQUEST_TIMEOUT_S = 15.0
"""How long one answer of a broker may take; above the session, as Faust demands."""
REBALANCE_TIMEOUT_S = 30.0
"""How long the others wait for a worker in a rebalance; nothing of ours holds one up, a batch in hand included."""
DRAIN_PERIOD_S = 0.25
"""How often work that waits for budget is tried when no records come."""
STORE_PROBE_S = 1.0
"""How long the store may take to give a sign of life; a healthy one takes a millisecond."""
STOP_POLL_S = 0.1
"""How often the running app looks whether it is to stop."""
STOP_TIMEOUT_S = 20.0
"""How long the batch in hand, and then leaving the group, may take at the end; below the usual grace of 30 s."""

logger = logging.getLogger(__name__)


class SolarisApp(faust.App):
    """A Faust app with what its agent works on."""

    batches: Batches
    watch: Watch


def create_app(
    settings: KafkaWorkerSettings,
    worker: BatchWorker,
    *,
    log: KafkaLog | None = None,
    watch: Watch | None = None,
    stop: threading.Event | None = None,
    topics: Sequence[str] = TOPICS,
    group: str = GROUP,
) -> SolarisApp:
    """Makes the app; the topics have to exist when it starts (`KafkaLog.ensure_topics`).

    Args:
        settings: where the brokers are.
        worker: whose handler takes the records.
        log: for rejected records; made from the settings where absent.
        watch: to be told of progress; made here where absent.
        stop: ends waiting in outages.
        topics: what to consume.
        group: the consumer's group.
    """
    security, addresses = settings.security(), servers(settings.kafka_bootstrap_servers)
    log = log or KafkaLog(addresses, security)
    app = SolarisApp(
        group,
        broker=[f"kafka://{address}" for address in addresses],
        broker_credentials=_credentials(security),
        broker_client_id=settings.consumer,
        broker_session_timeout=SESSION_TIMEOUT_MS / 1000,
        broker_heartbeat_interval=HEARTBEAT_MS / 1000,
        broker_max_poll_interval=MAX_POLL_INTERVAL_MS / 1000,
        broker_request_timeout=REQUEST_TIMEOUT_S,
        broker_rebalance_timeout=REBALANCE_TIMEOUT_S,
        consumer_auto_offset_reset="earliest",
        consumer_metadata_max_age_ms=METADATA_AGE_MS,
        stream_buffer_maxsize=BUFFER_RECORDS,
        stream_wait_empty=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        autodiscover=False,
        store="memory://",
        datadir=Path(tempfile.gettempdir()) / "specrank-faust",  # Faust insists on folders, which stay empty
        env_prefix="SPECRANK_FAUST_",  # it would listen to names as common as BROKER_URL
    )
    app.watch = watch or Watch(log, group, topics, worker.metrics.registry)
    app.batches = Batches(worker, log, group, topics, stop or threading.Event(), app.watch)
    topic = app.topic(
        *topics, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw", acks=False
    )

    @app.agent(topic, name="solaris", supervisor_strategy=CrashingSupervisor)
    async def handle(stream: Any) -> None:
        async for event in stream.events():
            await app.batches.put(app, event)

    @app.timer(DRAIN_PERIOD_S)
    async def drain() -> None:
        await app.batches.drain()

    @app.on_partitions_assigned.connect
    async def assigned(_: Any, places: Collection[Any], **__: Any) -> None:
        app.watch.assigned([(place.topic, place.partition) for place in places])

    return app


def serve(
    settings: KafkaWorkerSettings,
    worker: BatchWorker,
    log: KafkaLog,
    stop: threading.Event,
    *,
    topics: Sequence[str] = TOPICS,
    group: str = GROUP,
    store: Callable[[], object] = lambda: None,
) -> int:
    """Works until `stop` is set, waiting for the broker first if need be; a crash sets it.

    Args:
        settings: of the process. worker: whose handler takes the records. log: the log that it consumes. stop: ends it.
        topics: what to consume. group: the consumer's group.
        store: asks for a sign of life of the worker's store, see `Watch`.

    Returns:
        exit code: 0 if stopped, 1 if the worker should be started again.

    Raises:
        streams.log.kafka.TopicMismatchError: a topic exists with another number of partitions.
        OSError: the health port is taken.
    """
    for name in ("aiokafka", "faust", "mode"):
        # The first floods in an outage, of which the watch tells; the others tell of every step.
        logging.getLogger(name).setLevel(logging.CRITICAL if name == "aiokafka" else logging.WARNING)
    logging.getLogger("mode.timers").setLevel(logging.ERROR)  # a drain may well take longer than its period
    watch = Watch(log, group, topics, worker.metrics.registry, store=store)
    waiting = Delivery(log, group, worker.handle, stop, log.rejected)
    with contextlib.ExitStack() as stack:
        if settings.health_port is not None:
            stack.enter_context(health_server(settings.health_port, watch.ready, worker.metrics.render))
        stack.enter_context(watch.running())
        if not waiting.until_done(lambda: log.ensure_topics(topic_specs(settings.kafka_partitions, topics))):
            return 0
        with asyncio.Runner(loop_factory=event_loop()) as runner:
            return runner.run(_run(settings, worker, log, watch, stop, topics, group))


def event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (not on every system): a record costs Faust a fifth less."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _run(
    settings: KafkaWorkerSettings,
    worker: BatchWorker,
    log: KafkaLog,
    watch: Watch,
    stop: threading.Event,
    topics: Sequence[str],
    group: str,
) -> int:
    app = create_app(settings, worker, log=log, watch=watch, stop=stop, topics=topics, group=group)
    starting = asyncio.create_task(app.start())
    failed = False
    while not stop.is_set() and not failed:
        await asyncio.sleep(STOP_POLL_S)
        if starting.done() and starting.exception() is not None:
            logger.error("the app cannot start", exc_info=starting.exception())
            failed = True
        elif app.batches.failure is not None:
            logger.error("the handling of batches has failed", exc_info=app.batches.failure)
            failed = True
        elif app.should_stop:
            logger.error("the app has crashed", exc_info=app.crash_reason)
            failed = True
        elif watch.stalled_s > RESTART_LIMIT_S and not app.batches.in_hand:
            logger.error("the consumer has stalled for %.0f s", watch.stalled_s)
            failed = True
    watch.errors.labels("crash").inc(failed)
    stop.set()
    try:
        for step in (
            app.batches.finish,
            app.stop,
        ):  # also if the first hangs, as a commit does while the broker is away
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S / 2):
                    await step()
            except TimeoutError:
                logger.warning(
                    "%s took more than %.0f s; what is not committed will come again",
                    step.__qualname__,
                    STOP_TIMEOUT_S / 2,
                )
    finally:
        app.batches.close()
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await starting
    return int(failed)


def run_kafka_worker(settings: KafkaWorkerSettings) -> int:
    """Works until SIGTERM or SIGINT.

    Returns:
        exit code, see `serve`.

    Raises:
        streams.artifact.ArtifactError: a model is missing or damaged.
    """
    use_one_core()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with worker_process(lambda: make_worker(settings)) as worker:
        log = KafkaLog(settings.kafka_bootstrap_servers, settings.security())
        keep_loaded()
        code = serve(settings, worker, log, stop, store=store_probe(settings.redis_url))
    leave(code)
    return code


def leave(code: int) -> None:
    """Ends the process at once if a thread is left that would hold it: Faust's own waits for a broker that is away without a bound."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        logging.shutdown()
        os._exit(code)


def make_worker(settings: KafkaWorkerSettings, kind: type[Worker] = Worker) -> Worker:
    """The worker, with connections of its own.

    Raises:
        streams.artifact.ArtifactError: a model is missing or damaged.
    """
    log = KafkaLog(settings.kafka_bootstrap_servers, settings.security())  # where it publishes what it cannot take
    client = redis.Redis.from_url(settings.redis_url)
    return kind(client, log, Representer.load(settings.gem, settings.autoencoder), settings.worker_config())


def store_probe(url: str) -> Callable[[], object]:
    """Asks a store for a sign of life, on a connection of its own that neither waits nor tries again for long."""
    client = redis.Redis.from_url(
        url, socket_timeout=STORE_PROBE_S, socket_connect_timeout=STORE_PROBE_S, retry=Retry(NoBackoff(), 0)
    )
    return client.ping


def _credentials(security: KafkaSecurity) -> Any:
    if security.protocol.startswith("SASL"):
        return faust.SASLCredentials(
            username=security.username,
            password=security.password,
            mechanism=security.mechanism,
            ssl_context=security.ssl_context(),
        )
    return faust.SSLCredentials(security.ssl_context()) if security.protocol == "SSL" else None
