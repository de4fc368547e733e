"""One worker process as its parent sees it: how it is started, what it prints, and how it ends.

Guarantees: the worker inherits the parent's environment and import path but no part of a distributed job's identity;
the last 8 KiB of its output are kept; `reap` leaves no zombie, no open file, and no process of the worker's group.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from trl_a3po.workers import elsewhere
from trl_a3po.workers.channel import Channel
from trl_a3po.workers.standard_files import above_standard_files

_TAIL_BYTES = 8192

# What torchrun, accelerate and deepspeed tell a rank about itself. A worker is not a rank.
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
    """A started worker. `channel` is the parent's end of its socket; `output_fd` reads what it prints, without
    blocking.

    Start a worker from a thread that outlives it: Linux ends the worker when the thread that started it ends.

    Args:
        module: the module that the worker runs, as `python -m module SOCKET PARENT`; it calls `parents_channel` first.
        inherit_fds: open files that the worker inherits.
        threads: the worker's CPU threads; `None` leaves them to the environment.
        python: the interpreter that runs the worker, if not this one. The worker then imports this package and,
            beside it, what that interpreter's environment has (`elsewhere.py`).
        variables: environment variables of the worker, beside those of `worker_environment`.
        shows_output: also print the worker's output in this process, when `read_output` reads it.
    """

    def __init__(
        self,
        module: str,
        *,
        inherit_fds: tuple[int, ...] = (),
        threads: int | None = None,
        python: str | None = None,
        variables: Mapping[str, str] | None = None,
        shows_output: bool = False,
    ) -> None:
        self.shows_output = shows_output
        environment = worker_environment(threads) | dict(variables or {})
        if python is None or python == sys.executable:
            command = [sys.executable, "-P", "-m", module]  # -P: the working directory must not shadow a library
        else:
            command = [python, "-P", elsewhere.__file__, module]
            del environment["PYTHONPATH"]
        with above_standard_files():
            ours, theirs = socket.socketpair()
            self.output_fd, output = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), *inherit_fds),
                env=environment,
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

    @property
    def was_killed(self) -> bool:
        """The process has ended by SIGKILL: somebody, or the system for lack of memory, has killed it."""
        return self._process.poll() == -signal.SIGKILL

    @property
    def is_stopped(self) -> bool:
        """The process was stopped by a signal, and goes on when it is continued."""
        try:
            return is_stopped(self.pid)
        except FileNotFoundError:  # it has ended
            return False

    @property
    def how_to_continue(self) -> str:
        """What to do about a process that is stopped; it completes a sentence about a worker."""
        return f"(process {self.pid}) is stopped, and `kill -CONT {self.pid}` has it go on"

    def read_output(self) -> bool:
        """Keep what was printed since the last call. Returns `False` when there will be no more output."""
        while True:
            try:
                chunk = os.read(self.output_fd, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            if self.shows_output:
                print(chunk.decode(errors="replace"), end="", flush=True)  # prints nothing if stdout is closed

    @property
    def output_tail(self) -> str:
        """The end of what the worker has printed."""
        return self._tail.decode(errors="replace").strip()

    def reap(self, timeout: float, *, fault: str | None = None) -> str:
        """Wait up to `timeout` seconds for the process to end, kill it otherwise, and free what it held.

        Args:
            fault: kill the process at once because of this; it completes a sentence that begins with "The worker".

        Returns:
            How the process ended, such as "exit code 1".
        """
        if fault is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()
        self._process.wait()
        self.read_output()
        os.close(self.output_fd)
        self.channel.close()
        return _how_it_ended(self._process.returncode) if fault is None else f"killed because it {fault}"

    def abort(self) -> None:
        """Send the process SIGABRT, upon which it prints the stack of every thread, if it still can."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)

    def kill(self) -> None:
        """Kill the process and every process it started that is still in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal or a debugger."""
    if sys.platform == "linux":
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listed.stdout.strip().startswith("T")


def worker_environment(threads: int | None) -> dict[str, str]:
    """The environment of a worker: this process's environment and import path without a rank's identity, and with
    progress bars and warnings off."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(_import_path()),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",  # the last output gets out, however the worker ends
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
    """This process's import path, behind the standard library. A notebook imports the standard library's `queue`
    before a `queue.py` in its folder could hide it; a worker must find the same module."""
    library = os.path.dirname(os.__file__)
    paths = [library, os.path.join(library, "lib-dynload")]
    for path in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the working directory was removed
            paths.append(path or os.getcwd())
    return list(dict.fromkeys(paths))


def parents_channel() -> Channel:
    """The worker's end of the socket, which a worker asks for first. From here on the worker ends with its parent, and
    not on SIGTERM: SLURM sends SIGTERM to every process of a job, and the trainer then saves a checkpoint first."""
    end_with(int(sys.argv[2]))
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    return Channel(socket.socket(fileno=int(sys.argv[1])))


def end_with(parent: int | None) -> None:
    """Ask Linux to kill this process when its parent ends. On other systems the process ends when it next reads the
    socket and finds the other side closed."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    if ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(0)


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    hint = ", which is also what the system does when memory runs out" if name == "SIGKILL" else ""
    return f"{name}{hint}"
