"""A process that would wait for ever for one that failed ends by itself, also without a launcher."""

import os
import socket
import subprocess
import sys
import time

import pytest

from tests.distributed.launch import ROOT


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raises", "Ending process 0 of 2: process 1 of 2 failed: ZeroDivisionError: of process 1."),
        ("hangs", "Ending process 0 of 2: process 1 of 2 has given no sign of life for 3 s."),
    ],
)
def test_a_process_that_waits_for_a_failed_one_says_so_frees_and_ends(fault, why):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.watched", fault],
            cwd=ROOT,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        began = time.monotonic()
        printed, _ = processes[0].communicate(timeout=58)
        assert processes[0].returncode == 1 and time.monotonic() - began < 58
        assert why in printed and "freed" in printed, printed
    finally:
        for process in processes:
            process.kill()
            process.wait()
