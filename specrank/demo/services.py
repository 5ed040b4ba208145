"""The demo's processes: an embedded Valkey server, a Solaris worker and a ranking API, each as its own command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from downstream.serve import bind
from specrank.demo.config import RANKER, DemoConfig
from streams.embedded import EmbeddedValkey
from streams.errors import UserError

READY_S = 60.0
STOP_S = 10.0


class ServiceError(UserError, RuntimeError):
    """A process did not come up, or died; the message names it and its log."""


@dataclass
class Service:
    """One child process with a log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, arguments: list[str], environment: dict[str, str], log: Path) -> Service:
        """Starts `specrank <arguments>`."""
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "specrank", *arguments],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return cls(name, process, log)

    def check(self) -> None:
        """Raises `ServiceError` if the process has ended."""
        if self.process.poll() is not None:
            tail = self.log.read_text(errors="replace").strip().splitlines()[-3:]
            raise ServiceError(f"{self.name} ended with code {self.process.returncode}; {self.log}: {' | '.join(tail)}")

    def kill(self) -> None:
        """SIGKILL: no time to clean up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Service:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops the process."""
        self.stop()


def start_worker(config: DemoConfig, redis_url: str) -> Service:
    """A Solaris worker."""
    environment = {
        "SPECRANK_WORKER_GEM": str(config.models / "gem"),
        "SPECRANK_WORKER_AUTOENCODER": str(config.models / "autoencoder"),
        "SPECRANK_WORKER_REDIS_URL": redis_url,
        "SPECRANK_WORKER_SLATE_SIZE": str(config.candidates),
    }
    if config.kafka is not None:
        environment["SPECRANK_WORKER_KAFKA_BOOTSTRAP_SERVERS"] = config.kafka
    return Service.start("worker", ["solaris", "run"], environment, config.run / "worker.log")


def log_address(config: DemoConfig, redis_url: str) -> str:
    """Where activity and served requests go."""
    return redis_url if config.kafka is None else f"kafka://{config.kafka}"


@contextmanager
def api(config: DemoConfig, redis_url: str, port: int = 0) -> Iterator[str]:
    """A ranking API; gives its address once it is ready."""
    if port == 0:
        with bind("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
    environment = {
        "SPECRANK_API_RANKERS": str(config.rankers),
        "SPECRANK_API_REDIS_URL": redis_url,
        "SPECRANK_API_DEFAULT_VARIANT": RANKER,
        "SPECRANK_API_PORT": str(port),
        "SPECRANK_API_LOG_URL": log_address(config, redis_url),
    }
    url = f"http://127.0.0.1:{port}"
    with Service.start("api", ["downstream", "serve"], environment, config.run / "api.log") as service:
        _wait_ready(service, url)
        yield url


@contextmanager
def embedded_store() -> Iterator[EmbeddedValkey]:
    """An empty embedded Valkey server."""
    with EmbeddedValkey(appendonly=False) as server:
        server.client().flushall()
        yield server


def _wait_ready(service: Service, url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        service.check()
        try:
            if httpx.get(f"{url}/ready", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise ServiceError(f"{service.name} was not ready within {READY_S:.0f} s; see {service.log}")
