"""A server of one's own: where it answers and to whom, after its death too. Its vLLM is a stand-in."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from trl_a3po.engines.vllm.servers import guard
from trl_a3po.engines.vllm.servers.http import Call, ConnectionFault, TimeoutFault
from trl_a3po.engines.vllm.servers.server_process import ServerProcess
from trl_a3po.engines.vllm.servers.startup import ServerRequirements

SERVER = """
import http.server, os, socket, sys


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(os.getpid()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "a caller"


class Server(http.server.HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self):
        self.socket.bind(self.server_address)


Server(sys.argv[sys.argv.index("--uds") + 1], Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    requirements = ServerRequirements("model", "float32", 64, 64, ("processed_logprobs",))
    log = tmp_path / "log"
    process = ServerProcess(sys.executable, requirements, torch.device("cpu"), log, threads=1, max_restarts=1)
    yield process
    process.stop()


def pid_of(process: ServerProcess) -> int:
    process.wait_until_ready(30)
    return int(Call(process.server.url, "GET", "/anything", timeout=5).text())


def folder_of(process: ServerProcess) -> Path:
    return Path(process.server.url.removeprefix("unix://")).parent


def test_no_other_user_can_reach_it(server):
    pid_of(server)
    assert stat.S_IMODE(folder_of(server).stat().st_mode) == 0o700
    assert folder_of(server).stat().st_uid == os.getuid()


def test_it_answers_at_the_same_place_after_it_was_killed_and_started_again(server):
    first = pid_of(server)
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while server.restarts == 0 and time.monotonic() < deadline:
        server.keep_alive()
        time.sleep(0.05)
    assert pid_of(server) != first


def test_nothing_is_left_of_it(server):
    pid_of(server)
    server.stop()
    assert not folder_of(server).exists()
    with pytest.raises(ConnectionFault):
        server.server.ping()


def test_nothing_is_left_of_one_that_had_died(server):
    os.kill(pid_of(server), signal.SIGKILL)
    assert server._process.wait(20) != 0
    server.stop()
    assert not folder_of(server).exists()


def test_a_call_waits_for_a_socket_that_has_no_room_and_not_longer_than_its_limit(tmp_path):
    path = str(tmp_path / "a socket? #1")
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(path)
        with pytest.raises(TimeoutFault):
            Call(f"unix://{path}", "GET", "/health", timeout=0.5).text()

        def answer() -> None:
            time.sleep(0.5)
            busy.accept()[0].close()
            caller, _ = busy.accept()
            caller.recv(4096)
            caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
            caller.close()

        answering = threading.Thread(target=answer)
        answering.start()
        assert Call(f"unix://{path}", "GET", "/health", timeout=10).text() == "hi"
        answering.join()
        waiting.close()


PARENT = """
import os, signal, subprocess, sys, time

command = [sys.executable, sys.argv[1], str(os.getpid()), *sys.argv[2:]]
guarded = subprocess.Popen(command, stdin=0, start_new_session=True)
while not os.listdir(sys.argv[2]):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_leaves_no_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    begun = f"import time; open({str(folder / 'begun')!r}, 'w'); time.sleep(60)"
    command = [sys.executable, "-c", PARENT, guard.__file__, str(folder), sys.executable, "-c", begun]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE)  # which stays open, as where a fork of the parent lives
    assert parent.wait(20) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_does_not_import_from_the_folder_we_stand_in(server, tmp_path, monkeypatch):
    pid_of(server)
    server.stop()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "http.py").write_text("raise ImportError('this is not the library')")
    monkeypatch.chdir(tmp_path / "here")
    requirements = ServerRequirements("model", "float32", 64, 64, ("processed_logprobs",))
    other = ServerProcess(
        sys.executable, requirements, torch.device("cpu"), tmp_path / "log", threads=1, max_restarts=0
    )
    try:
        assert pid_of(other)
    finally:
        other.stop()
