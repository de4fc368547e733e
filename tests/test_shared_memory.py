"""A run needs no room in `/dev/shm`: weights travel in anonymous memory, and groups over sockets."""

import os
import subprocess
import sys

import pytest

from tests.workers.processes import own_shared_memory

FULL = """
import os
from pathlib import Path
from tests.runs import build, reward
try:
    with open("/dev/shm/full", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError as error:
    print(error)
trainer = build({model!r}, Path({folder!r}), engine="transformers", engine_threads=1, reward_workers=1,
                max_steps=2, max_staleness=1, save_strategy="steps", save_steps=1, delivery_check_steps=1)
trainer.train()
assert trainer.state.global_step == 2
print("trained, with", os.listdir("/dev/shm"))
"""


@pytest.mark.long
def test_a_full_shared_memory_changes_nothing(model_path, tmp_path):
    inside = own_shared_memory("64k")
    if not inside:
        pytest.skip("no file system of one's own can be mounted here")
    command = [*inside, sys.executable, "-c", FULL.format(model=model_path, folder=str(tmp_path))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "No space left on device" in done.stdout and "trained, with ['full']" in done.stdout
