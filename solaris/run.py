"""Runs one Solaris worker process of the embedded mode; `solaris.app` is its twin on Kafka."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

import redis

from kernels.host import keep_loaded, use_one_core
from loopfm.represent import Representer
from solaris.app_health import health_server
from solaris.settings import WorkerSettings
from solaris.worker import Worker
from streams.log.valkey import ValkeyLog

logger = logging.getLogger(__name__)


def run_worker(settings: WorkerSettings) -> None:
    """Works until SIGTERM or SIGINT.

    Raises:
        streams.artifact.ArtifactError: a model is missing or damaged.
        OSError: the health port is taken.
    """
    use_one_core()
    representer = Representer.load(settings.gem, settings.autoencoder)
    client = redis.Redis.from_url(settings.redis_url)
    log = ValkeyLog(client)
    worker = Worker(client, log, representer, settings.worker_config())
    keep_loaded()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logger.info("worker %s serves FM version %016x", settings.consumer, representer.version)
    with contextlib.ExitStack() as stack:
        if settings.health_port is not None:
            stack.enter_context(health_server(settings.health_port, lambda: _ready(log), worker.metrics.render))
        worker.run(settings.consumer, stop)


def _ready(log: ValkeyLog) -> tuple[bool, dict[str, object]]:
    return log.healthy, {"status": "ready" if log.healthy else "stalled", "poll_age_s": min(log.poll_age_s, 1e9)}
