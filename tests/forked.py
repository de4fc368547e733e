"""Processes that run `python -m MODULE` as a shell would, but have torch, transformers, TRL and the library imported
when they begin, which is most of what a short run takes.

They are forked from one server for each process of pytest, which imports `PRELOADED` when it is first needed. They see
no GPU, because CUDA cannot be used where it was looked for before a fork.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRELOADED = ["tests.forked", "tests.preloaded"]


class Forked:
    """Has what the tests use of `subprocess.Popen`, with the output of the process in the file `output`.

    Args:
        arguments: of the command line.
        environment: of the process, all of it.
        output: file that the process appends to.
    """

    def __init__(self, module: str, *arguments: object, environment: Mapping[str, str], output: Path):
        self._output = output
        output.touch()
        context = multiprocessing.get_context("forkserver")
        _start_server()
        self._process = context.Process(
            target=_run, args=(module, list(map(str, arguments)), dict(environment), str(output))
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _start_server() -> None:
    """The server has the environment alone to find modules with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


def _run(module: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """In the new process: `module`, and then what the interpreter does at its end."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update({**environment, "CUDA_VISIBLE_DEVICES": ""})
    sys.argv = [module, *arguments]
    faulthandler.enable()
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.stdout.flush()
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
