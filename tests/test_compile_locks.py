"""A lock that a killed compilation has left is named before DeepSpeed waits for it."""

import os
import time

import pytest

from trl_a3po import A3POConfig
from trl_a3po.config.compile_locks import QUIET


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """The lock of an operator, in a folder that last changed long ago."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    age(lock, QUIET + 60)
    return lock


def age(file, seconds):
    then = time.time() - seconds
    os.utime(file, (then, then))


def warned(tmp_path, caplog, **settings):
    A3POConfig(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none", **settings)
    return [record.getMessage() for record in caplog.records if "compilation" in record.getMessage()]


@pytest.fixture
def launched(monkeypatch):
    """By `accelerate launch`, but for the plugin that it would make."""
    monkeypatch.setattr("trl_a3po.config.a3po_config.is_launched_with_deepspeed", lambda: True)


def test_a_lock_that_was_left_is_named_with_what_to_do(tmp_path, caplog, lock, launched):
    (warning,) = warned(tmp_path, caplog)
    assert f"rm {lock}" in warning


def test_a_compilation_that_goes_on_is_not_reported(tmp_path, caplog, lock, launched):
    (lock.parent / "cpu_adam.o").touch()
    assert not warned(tmp_path, caplog)


def test_a_lock_that_was_just_made_is_not_reported(tmp_path, caplog, lock, launched):
    age(lock, 1)
    assert not warned(tmp_path, caplog)


def test_without_deepspeed_nothing_is_looked_for(tmp_path, caplog, lock):
    assert not warned(tmp_path, caplog)


def test_a_folder_that_cannot_be_looked_at_is_left_out(tmp_path, caplog, lock, launched, monkeypatch):
    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("pathlib.Path.iterdir", refused)
    assert not warned(tmp_path, caplog)


def test_the_launcher_says_that_deepspeed_is_used(monkeypatch):
    from trl_a3po.config.compile_locks import is_launched_with_deepspeed

    assert not is_launched_with_deepspeed()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert is_launched_with_deepspeed()


def test_the_folder_of_torch_is_where_torch_compiles(tmp_path, caplog, monkeypatch, launched):
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path / "root"))
    folder = cpp_extension._get_build_directory("cpu_adam", verbose=False)
    lock = os.path.join(folder, "lock")
    open(lock, "w").close()
    age(lock, QUIET + 60)
    (warning,) = warned(tmp_path, caplog)
    assert lock in warning
