"""A vLLM server that this process starts, restarts when it dies, and stops.

Guarantees: neither the server nor what it starts outlives this process, also when that is killed; no other user of the
machine reaches it, for its endpoints load weights and trust who calls; its log is a file whose end is in every error;
it inherits nothing of a distributed job's identity.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from trl_a3po.engines.vllm.servers import guard
from trl_a3po.engines.vllm.servers.http import HttpFault
from trl_a3po.engines.vllm.servers.server import Server
from trl_a3po.engines.vllm.servers.startup import ServerRequirements, server_arguments, server_environment
from trl_a3po.errors import EngineError
from trl_a3po.workers.process import worker_environment

_TAIL_BYTES = 4096
_STOP_TIMEOUT = 10.0


class ServerProcess:
    """
    Args:
        python: an interpreter that can import vLLM.
        requirements: what it serves, and how.
        device: where it computes; "cpu", or a GPU, of which it then sees no other.
        log: file it prints to.
        threads: its CPU threads; `None` for those of the environment.
        max_restarts: times it is started again after it died.
        port: of this machine, where it answers anyone; without it, at a socket in a folder of this user's alone.
    """

    def __init__(
        self,
        python: str,
        requirements: ServerRequirements,
        device: torch.device,
        log: Path,
        *,
        threads: int | None,
        max_restarts: int,
        port: int | None = None,
    ):
        self.restarts = 0
        self._max_restarts = max_restarts
        self._log = log
        self._socket: Path | None = None
        if port is None:
            self._socket = _private_folder() / "vllm.sock"
            url, where = f"unix://{self._socket}", ["--uds", str(self._socket)]
        else:
            url, where = f"http://127.0.0.1:{port}", ["--host", "127.0.0.1", "--port", str(port)]
        folder = "" if self._socket is None else str(self._socket.parent)  # the guard removes it
        self.server = Server(url)
        model, *options = server_arguments(requirements)
        self._command = [
            *(sys.executable, "-P", guard.__file__, str(os.getpid()), folder),
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "policy"),
            *(*where, *options),
        ]
        self._environment = worker_environment(threads)
        self._environment["PYTHONSAFEPATH"] = "1"  # the folder we stand in must not shadow a library
        self._environment.pop("PYTHONPATH")  # of this interpreter, which need not be the server's
        if python == sys.executable and "PYTHONPATH" in os.environ:
            self._environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        self._environment |= server_environment(requirements)
        if device.type == "cpu":
            self._command.append("--enforce-eager")
            for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):
                self._environment.setdefault(name, value)
        if device.type == "cuda":
            self._environment["CUDA_VISIBLE_DEVICES"] = _physical(device)
        self._stopping = False
        try:
            self._process = self._start()
        except BaseException:
            self._remove_socket()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)  # of the one that died
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # never written: it ends when we do
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def wait_until_ready(self, timeout: float) -> None:
        """Raises `EngineError`, with the end of its log, when it dies or is not ready within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            if self._process.poll() is not None:
                raise EngineError(f"The vLLM server ended with exit code {self._process.returncode}. {self.log_tail}")
            try:
                self.server.ping()
                return
            except HttpFault:
                time.sleep(0.2)
            if time.monotonic() > deadline:
                raise EngineError(f"The vLLM server was not ready within {timeout:g} s. {self.log_tail}")

    def keep_alive(self) -> None:
        """Restart the server if it has died. Raises `EngineError` when it has been restarted too often."""
        if self._stopping or self._process.poll() is None:
            return
        if self.restarts >= self._max_restarts:
            raise EngineError(
                f"The vLLM server ended with exit code {self._process.returncode}, after it had been restarted "
                f"engine_restarts={self._max_restarts} times. {self.log_tail}"
            )
        self.restarts += 1
        self._process = self._start()

    def stop(self) -> None:
        self._stopping = True
        if self._process.poll() is None:
            if self._process.stdin is not None:
                self._process.stdin.close()  # asks the guard to end everything
            try:
                self._process.wait(_STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._socket is not None:
            shutil.rmtree(self._socket.parent, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Process group of the server and of what it started."""
        return self._process.pid

    @property
    def log_tail(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            return f"Its log, {self._log}, ends with:\n{file.read().decode(errors='replace').strip()}"


def _private_folder() -> Path:
    """A new one that only this user may enter, with a path short enough for a socket in it."""
    return Path(tempfile.mkdtemp(prefix="a3po-", dir="/tmp" if len(tempfile.gettempdir()) > 70 else None))


def _physical(device: torch.device) -> str:
    """The number of `device` in `CUDA_VISIBLE_DEVICES` of a process that is to see it alone."""
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)
