"""What a command does when nobody reads its output any more."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from trl_a3po.cli.main import main
from trl_a3po.cli.unread_output import quiet_when_unread


@contextlib.contextmanager
def unread(*, write_through: bool):
    """Standard output is a pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as raw:
        file = open(os.dup(raw.fileno()), "w", closefd=True)  # noqa: SIM115  # closed below
        file.reconfigure(write_through=write_through)
        with contextlib.redirect_stdout(file):
            yield
        file.close()


@pytest.mark.parametrize("write_through", [True, False])
@pytest.mark.parametrize("command", ["doctor {log}", "env", "--help", "plan --help", "plan --run nowhere"])
def test_a_command_whose_output_is_not_read_ends_quietly(tmp_path, capsys, command, write_through):
    (tmp_path / "run.log").write_text("")
    with unread(write_through=write_through), pytest.raises(SystemExit) as ended:
        main(command.format(log=tmp_path / "run.log").split())
    error = capsys.readouterr().err
    if "nowhere" in command:  # prints nothing, and so does not notice
        assert ended.value.code == 2 and "nowhere holds no timeline" in error
    else:
        assert ended.value.code in (128 + signal.SIGPIPE, 0)  # argparse passes over what it cannot print at once
        assert error == ""


def test_a_connection_that_somebody_else_closed_stays_an_error(capsys):
    with pytest.raises(BrokenPipeError), quiet_when_unread():
        raise BrokenPipeError("of a worker")
    assert capsys.readouterr().err == ""


def test_nothing_is_said_at_the_end_of_the_process_either(tmp_path):
    (tmp_path / "run.log").write_text("")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "trl_a3po", "doctor", str(tmp_path / "run.log")],
            stdout=output, stderr=subprocess.PIPE, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_a_command_without_an_output_ends_well(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it where file 1 was closed
    main(["env"])
