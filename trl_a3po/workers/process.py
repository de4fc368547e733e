"""One worker process as its parent sees it: how it is started, its last words, its end.

Guarantees: the worker inherits the parent's environment and import path but no part of a distributed job's identity;
what it prints is kept (the last 8 KiB); `bury` leaves no zombie, no open file, and nothing that the worker started.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys

from trl_a3po.workers.channel import Channel

_TAIL = 8192

# What torchrun, accelerate and deepspeed tell a rank about itself. A worker is no rank.
_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CROSS_RANK",
    "CROSS_SIZE",
)
_RANK_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "DEEPSPEED_", "PET_", "OMPI_", "PMI_")


class WorkerProcess:
    """A started worker. `channel` is our end of its socket, `output_fd` what it prints (non-blocking).

    Start it from a thread that outlives it: Linux ends the worker when the thread that started it ends.

    Args:
        module: what the worker runs, as `python -m module SOCKET PARENT`; it calls `parents_channel` first.
        inherit_fds: open files that it inherits.
        threads: its CPU threads, `None` for those of the environment.
        shows_output: what it prints is printed here too, when `read_output` gets it.
    """

    def __init__(
        self,
        module: str,
        *,
        inherit_fds: tuple[int, ...] = (),
        threads: int | None = None,
        shows_output: bool = False,
    ):
        self.shows_output = shows_output
        ours, theirs = socket.socketpair()
        self.output_fd, output = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # the folder we stand in must not shadow a library
                    "-m",
                    module,
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), *inherit_fds),
                env=worker_environment(threads),
                start_new_session=True,  # Ctrl-C is for the trainer, which then closes the engine
            )
        finally:
            theirs.close()
            os.close(output)
        os.set_blocking(self.output_fd, False)
        self.channel = Channel(ours)
        self._tail = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def read_output(self) -> bool:
        """Keep what was printed since the last call; `False` when there will be no more."""
        while True:
            try:
                chunk = os.read(self.output_fd, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._tail = (self._tail + chunk)[-_TAIL:]
            if self.shows_output:
                sys.stdout.write(chunk.decode(errors="replace"))
                sys.stdout.flush()

    @property
    def last_words(self) -> str:
        return self._tail.decode(errors="replace").strip()

    def bury(self, grace: float) -> str:
        """End the process if it does not within `grace` seconds, free what it held, and say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        self.kill()
        self._process.wait()
        self.read_output()
        os.close(self.output_fd)
        self.channel.close()
        return _how_it_ended(self._process.returncode)

    def abort(self) -> None:
        """End the process so that it prints the stack of every thread, if it still can."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)

    def kill(self) -> None:
        """Kill the process and what it started, as far as that stayed in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def worker_environment(threads: int | None) -> dict[str, str]:
    """Environment of a worker: ours, without a rank's identity, with our import path, quiet."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(_import_path()),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",  # last words get out whatever the end
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment


def _import_path() -> list[str]:
    """Ours, behind the standard library: a `queue.py` beside a notebook hides nothing from the notebook, which had
    imported the library's before."""
    library = os.path.dirname(os.__file__)
    paths = [library, os.path.join(library, "lib-dynload")]
    for path in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the folder we stand in was removed
            paths.append(path or os.getcwd())
    return list(dict.fromkeys(paths))


def parents_channel() -> Channel:
    """Called first by a worker: its end of the socket it was started with. From here on it ends with its parent."""
    _end_with(int(sys.argv[2]))
    return Channel(socket.socket(fileno=int(sys.argv[1])))


def _end_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, whatever it is at. Elsewhere the end of the socket ends it,
    when it next looks."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    if ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before we asked
        os._exit(0)


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    hint = ", which is also what the system does when memory runs out" if name == "SIGKILL" else ""
    return f"{name}{hint}"
