"""A vLLM server on this machine for benchmarks and tests: started, waited for, and stopped with all its processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from trl_a3po.engines.vllm.servers.http import HttpFault
from trl_a3po.engines.vllm.servers.server import Server
from trl_a3po.engines.vllm.servers.startup import ServerRequirements, server_arguments, server_environment
from trl_a3po.workers.process import worker_environment

_STOP_TIMEOUT = 10.0


class VLLMServer:
    """It answers on the loopback interface alone, for the model "policy" and for one with the name of its folder.

    Args:
        python: an interpreter that can import vLLM.
        requirements: what it serves, and how.
        device: where it computes; "cpu", or a GPU of a process that sees all of them.
        log: file it prints to.
        port: where it answers.
        threads: its CPU threads; `None` for those of the environment.
    """

    def __init__(
        self,
        python: str,
        requirements: ServerRequirements,
        device: torch.device,
        log: Path,
        *,
        port: int,
        threads: int | None = None,
    ):
        self.server = Server(f"http://127.0.0.1:{port}")
        self._log = log
        model, *options = server_arguments(requirements)
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--served-model-name", "policy", model, "--host", "127.0.0.1", "--port", str(port), *options),
        ]
        ours = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
        self._environment = worker_environment(threads) | {"PYTHONPATH": ours} | server_environment(requirements)
        if device.type == "cuda":
            self._environment["CUDA_VISIBLE_DEVICES"] = str(device.index)
        else:
            self._command.append("--enforce-eager")
            self._environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.start()

    def start(self) -> None:
        """Also again, after it has died."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def wait_until_ready(self, timeout: float) -> None:
        """Raises `RuntimeError`, with the end of its log, when it dies or is not ready within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(HttpFault):
                return self.server.ping()
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-4096:]
                raise RuntimeError(f"The vLLM server did not start. Its log, {self._log}, ends with:\n{tail}")
            time.sleep(0.2)

    @property
    def pid(self) -> int:
        """The process group of the server and of what it started."""
        return self._process.pid

    def stop(self) -> None:
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
