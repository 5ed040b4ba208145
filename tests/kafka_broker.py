"""A genuine Kafka broker for the tests: one KRaft node, started from the distribution that KAFKA_HOME names."""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 60.0
"""A broker is up in 1 to 2 s on an idle machine; a restart waits for its old session (3 s) on top."""
STOP_TIMEOUT_S = 10.0

_JAVA = "-Xms128m -Xmx384m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # soon up, and no more threads than needed
_PROPERTIES = """
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
controller.quorum.voters=1@127.0.0.1:{controller}
log.dirs={folder}/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
auto.create.topics.enable=false
log.cleaner.dedupe.buffer.size=8388608
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000
"""


class Broker:
    """One node in a temporary folder, which keeps its ports and data over restarts."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder = Path(tempfile.mkdtemp(prefix="specrank-kafka-"))
        self._properties = self._folder / "server.properties"
        port, controller = _free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._properties.write_text(_PROPERTIES.format(port=port, controller=controller, folder=self._folder))
        self._format()

    def start(self) -> None:
        """Start the node and wait until it says that it serves. No effect while it runs."""
        if self._process is not None:
            return
        log = self._folder / "server.log"
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                [self._home / "bin" / "kafka-server-start.sh", self._properties],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._environment(),
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"Kafka Server started" not in log.read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the broker did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the node and delete its data."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _format(self) -> None:
        cluster = base64.urlsafe_b64encode(b"t" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        script = self._home / "bin" / "kafka-storage.sh"
        command = [script, "format", "-t", cluster, "-c", self._properties]
        done = subprocess.run(
            command, capture_output=True, timeout=START_TIMEOUT_S, cwd=self._folder, env=self._environment()
        )
        if done.returncode:
            raise RuntimeError(
                f"formatting the broker's folder failed: {done.stdout[-1000:]!r} {done.stderr[-1000:]!r}"
            )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "LOG_DIR": str(self._folder / "logs"), "KAFKA_HEAP_OPTS": _JAVA}


def kafka_home() -> Path:
    """The distribution; without one the test is skipped, and fails in CI, where it is required."""
    home, reason = os.environ.get("KAFKA_HOME"), "KAFKA_HOME names no Kafka distribution"
    if home and (Path(home) / "bin" / "kafka-server-start.sh").exists():
        if shutil.which("java") or os.environ.get("JAVA_HOME"):
            return Path(home)
        reason = "Kafka needs Java, and there is none"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; it is required in CI")
    pytest.skip(reason)


@functools.cache
def shared_broker() -> Broker:
    """The one broker of a test run, however many conftest files import these fixtures."""
    broker = Broker(kafka_home())
    atexit.register(broker.close)
    broker.start()
    return broker


@pytest.fixture(scope="session")
def kafka_address() -> str:
    """Address of the broker in KAFKA_BOOTSTRAP_SERVERS, or of the one that is started here."""
    return os.environ.get("KAFKA_BOOTSTRAP_SERVERS") or shared_broker().address


@pytest.fixture
def broker() -> Iterator[Broker]:
    """The broker that is started here, to be killed and started again; the fixture leaves it running."""
    if os.environ.get("KAFKA_BOOTSTRAP_SERVERS") and not os.environ.get("KAFKA_HOME"):
        pytest.skip("the broker in KAFKA_BOOTSTRAP_SERVERS is not ours to kill, and KAFKA_HOME names no other")
    running = shared_broker()
    yield running
    running.start()


@pytest.fixture
def unique() -> str:
    """A name for topics and groups that no other test has used on this broker."""
    return uuid.uuid4().hex[:12]


@contextlib.contextmanager
def knocks(address: str) -> Iterator[list[str]]:
    """Names of the threads that try to connect to an address, once for each try of this process."""
    host, _, port = address.partition(":")
    found: list[str] = []
    methods = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def connect(self: socket.socket, to: Any) -> Any:
            if to[:2] == (host, int(port)):
                found.append(threading.current_thread().name)
            return method(self, to)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for name, method in methods.items():
            patch.setattr(socket.socket, name, noting(method))
        yield found


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
