"""Starts a module of this folder in several processes, as `torchrun` does for a user."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(
    module: str, *arguments: object, processes: int = 2, timeout: float = 240.0, config: str | None = None
) -> subprocess.CompletedProcess:
    """Run `python -m module *arguments` in `processes` processes, with `torchrun` or, given one of the recipes'
    configurations, with `accelerate launch`; whatever it prints is in `stdout`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed compiles an op with ninja
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    if config is not None:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        command += ["--config_file", f"recipes/accelerate_configs/{config}.yaml", "--mixed_precision", "no"]
    return subprocess.run(
        [*command, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
