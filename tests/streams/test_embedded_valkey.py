from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

import streams
from streams.embedded import MAX_SOCKET_PATH_BYTES, EmbeddedServerError, EmbeddedValkey

ROOT = str(Path(streams.__file__).parents[1])


def process_id(client: redis.Redis) -> int:
    return int(client.info("server")["process_id"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object, timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_data_and_port_survive(tmp_path: Path, end: str) -> None:
    with EmbeddedValkey(tmp_path / "with space") as server:
        port, url = server.port, server.url
        server.client().set("key", b"\xffvalue")
        getattr(server, end)()
        assert not server.running
        with pytest.raises(redis.ConnectionError):
            server.client().ping()
        server.start()
        assert (server.port, server.url) == (port, url)
        assert redis.Redis.from_url(url).get("key") == b"\xffvalue"
    assert not server.running and (tmp_path / "with space").exists()


def test_without_the_file_a_kill_loses_the_data(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path, appendonly=False) as server:
        server.client().set("key", "value")
        server.kill()
        assert server.start().client().get("key") is None


def test_settings_of_the_server() -> None:
    with EmbeddedValkey(fsync="always") as server:
        client = server.client()
        settings = client.config_get("maxmemory-policy", "bind", "appendonly", "appendfsync")
        expected = {"maxmemory-policy": "noeviction", "bind": "127.0.0.1", "appendonly": "yes", "appendfsync": "always"}
        assert settings == expected
        pid = process_id(client)
        assert os.getsid(pid) != os.getsid(0)  # Ctrl-C in a terminal does not reach it
        assert server.start() is server and process_id(client) == pid
        folder = server.folder
    assert not folder.exists() and not alive(pid)


def test_a_busy_port_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EmbeddedValkey(port=port)
        with pytest.raises(EmbeddedServerError, match=f"port {port} of 127.0.0.1 is in use"):
            server.start()
        assert not server.running
    with server:  # free again
        assert server.port == port and server.client().ping()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("not a folder")
    with pytest.raises(EmbeddedServerError, match=r"ended with code 1; its log ends:\n(.*\n)*.*appendonlydir"):
        EmbeddedValkey(tmp_path).start()


@pytest.mark.parametrize("name", ["short", "long" * 40])
def test_unix_socket_in_folders_of_any_length(tmp_path: Path, name: str) -> None:
    with EmbeddedValkey(tmp_path / name, port=None, unix_socket=True) as server:
        assert server.port is None and server.url == server.socket_url
        assert redis.Redis.from_url(server.url).ping()
        path = server.socket_path
        assert path is not None and len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
        assert path.stat().st_mode & 0o077 == 0
        server.kill()
        assert server.start().client().ping()  # over the socket file that the kill left
    assert not path.exists()


def test_illegal_arguments() -> None:
    with pytest.raises(ValueError, match="listen nowhere"):
        EmbeddedValkey(port=None)
    with pytest.raises(ValueError, match="port is 70000"):
        EmbeddedValkey(port=70_000)
    with pytest.raises(ValueError, match="legal values: 'everysec', 'always'"):
        EmbeddedValkey(fsync="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no unix socket"):
        _ = EmbeddedValkey().socket_url


def test_it_outlives_the_thread_that_started_it() -> None:
    server = EmbeddedValkey()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    with server:
        assert server.running and server.client().ping()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_it_ends_with_its_process(end: signal.Signals | None) -> None:
    script = """
import sys
from streams.embedded import EmbeddedValkey
server = EmbeddedValkey().start()
print(server.client().info("server")["process_id"], server.folder, flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        pid, folder = owner.stdout.readline().split()
        assert alive(int(pid))
        if end is None:
            owner.stdin.write("\n")
            owner.stdin.flush()
        else:
            owner.send_signal(end)
        owner.wait(10)
        assert wait_until(lambda: not alive(int(pid)))
        assert end is not None or not Path(folder).exists()
