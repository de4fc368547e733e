"""Starts a module of this folder in several processes, as `torchrun` or `accelerate launch` does for a user."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from tests.forked import ROOT, Forked

LOCALHOST = "127.0.0.1"
TERMINATE_SECONDS = 30.0  # as with torchrun


def launch(
    module: str,
    *arguments: object,
    processes: int = 2,
    timeout: float = 240.0,
    config: str | None = None,
    torchrun: bool = False,
) -> subprocess.CompletedProcess:
    """Run `python -m module *arguments` in `processes` processes; whatever they print is in `stdout`. They find each
    other as with `torchrun`, but begin with everything imported; `torchrun` has that launcher start them, and one of
    the recipes' configurations `accelerate launch`."""
    if config is None and not torchrun:
        return _launch_forked(module, *arguments, processes=processes, timeout=timeout)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    if config is not None:
        command = _accelerate(config, "--num_processes", processes, "--main_process_port", free_port())
    return subprocess.run(
        [*command, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def _launch_forked(module: str, *arguments: object, processes: int, timeout: float) -> subprocess.CompletedProcess:
    """As `torchrun`, holds the key-value store, and terminates the other processes when one has failed."""
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    shared = _environment() | {
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    command = [module, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output.txt")
        running = [
            Forked(*command, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, output=output)
            for rank in range(processes)
        ]
        try:
            failed = _first_failure(running, timeout)
            for process in running:
                process.send_signal(signal.SIGTERM)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATE_SECONDS)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return subprocess.CompletedProcess(command, failed, output.read_text(errors="replace"))


def _first_failure(running: list[Forked], timeout: float) -> int:
    """The exit code of the first process that fails, or 0 when all have ended well."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.returncode for process in running]
        failed = next(filter(None, codes), None)
        if failed is not None:
            return failed
        if None not in codes:
            return 0
        assert time.monotonic() < deadline, f"after {timeout:.0f} s, still running: {running[0].printed[-4000:]}"
        time.sleep(0.02)


def launch_machines(
    module: str, *arguments: object, processes: int = 2, timeout: float = 240.0, config: str = "ddp"
) -> list[subprocess.CompletedProcess]:
    """As `launch`, by one `accelerate launch` for each of two machines, both of which are this one; `{machine}` in an
    argument is its number. Each must have ended after `timeout` seconds."""
    options = ["--num_machines", 2, "--num_processes", processes, "--same_network"]
    options += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
    machines = [
        subprocess.Popen(
            [
                *_accelerate(config, *options, "--machine_rank", machine),
                *("-m", module, *(str(argument).format(machine=machine) for argument in arguments)),
            ],
            cwd=ROOT,
            env=_environment(),
            stdout=outputs[machine],
            stderr=subprocess.STDOUT,
        )
        for machine in range(2)
    ]
    until = time.monotonic() + timeout
    try:
        for machine in machines:
            machine.wait(timeout=max(0.0, until - time.monotonic()))
    finally:
        for machine in machines:
            machine.terminate()  # which ends its processes
            machine.wait(timeout=60)
    printed = []
    for output in outputs:
        output.seek(0)
        printed.append(output.read())
        output.close()
    return [
        subprocess.CompletedProcess(machine.args, machine.returncode, text)
        for machine, text in zip(machines, printed, strict=True)
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _accelerate(config: str, *options: object) -> list[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    command += ["--config_file", f"recipes/accelerate_configs/{config}.yaml", *map(str, options)]
    return command


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
