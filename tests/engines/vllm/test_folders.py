"""Folders of weights on their way: those of killed runs are removed, those of living ones are not."""

import multiprocessing
import subprocess
import sys

from trl_a3po.engines.vllm.servers.folders import EngineFolder

KILLED = """
import os, signal, sys
from pathlib import Path
from trl_a3po.engines.vllm.servers.folders import EngineFolder

folder = EngineFolder(Path(sys.argv[1]))
folder.make()
(folder.path / "weights").write_bytes(bytes(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def made(place) -> EngineFolder:
    folder = EngineFolder(place)
    folder.make()
    return folder


def test_what_a_killed_process_left_is_removed_by_the_next_engine(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.glob("engine-*")
    assert (left / "weights").exists()
    folder = made(tmp_path)
    assert list(tmp_path.glob("engine-*")) == [folder.path]
    folder.remove()
    assert not list(tmp_path.glob("engine-*"))


def test_the_folder_of_an_engine_that_lives_stays(tmp_path):
    first, second = made(tmp_path), made(tmp_path)
    assert first.path.exists() and second.path.exists()
    first.remove()
    assert second.path.exists()


def test_what_another_machine_left_stays(tmp_path):
    """Its locks may not be seen here."""
    left = tmp_path / "engine-0"
    left.mkdir()
    (left / "lock").write_text("another-machine")
    made(tmp_path)
    assert left.exists()


def test_one_that_is_being_made_stays(tmp_path):
    young = tmp_path / "engine-0"
    young.mkdir()
    (young / "lock-new").touch()
    made(tmp_path)
    assert young.exists()


def test_it_ends_with_its_engine(tmp_path):
    path = made(tmp_path).path  # nobody keeps it
    assert not path.exists()


def test_a_forked_copy_removes_nothing(tmp_path):
    folder = made(tmp_path)
    copy = multiprocessing.get_context("fork").Process(target=folder.remove)
    copy.start()
    copy.join(30)
    assert copy.exitcode == 0 and folder.path.exists()
