"""Starts a module of this folder in several processes, as `torchrun` does for a user."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(
    module: str, *arguments: object, processes: int = 2, timeout: float = 240.0, config: str | None = None
) -> subprocess.CompletedProcess:
    """Run `python -m module *arguments` in `processes` processes, with `torchrun` or, given one of the recipes'
    configurations, with `accelerate launch`; whatever it prints is in `stdout`."""
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
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed compiles an op with ninja
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": path}
