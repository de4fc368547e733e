"""What the worker of an engine sends as it ends: an error of its own, in one line, and nothing of a signal."""

import pytest

from trl_a3po.engines import worker_loop
from trl_a3po.engines.worker_loop import ERROR_CHARACTERS, run_worker


class Ended(BaseException):
    """In place of the end of the process."""


class Sent(list):
    """A channel that keeps what is sent."""

    send = list.append

    def drain(self):
        self.append("drained")


def end_of_a_worker(monkeypatch, error: BaseException) -> tuple[int, list]:
    """The exit code of a worker whose set-up raises `error`, and what it has sent."""

    def set_up(channel):
        raise error

    def end(code):
        raise Ended(code)

    sent = Sent()
    monkeypatch.setattr(worker_loop, "parents_channel", lambda: sent)
    monkeypatch.setattr(worker_loop.os, "_exit", end)
    logger = worker_loop.logging.getLogger("trl_a3po")
    handlers = list(logger.handlers)
    try:
        with pytest.raises(Ended) as ended:
            run_worker(set_up)
    finally:
        logger.handlers = handlers
    return ended.value.args[0], list(sent)


def test_an_error_is_sent_in_one_line_before_the_worker_ends(monkeypatch, capsys):
    code, sent = end_of_a_worker(monkeypatch, MemoryError("no\n  memory"))
    assert (code, sent) == (1, [("raised", "MemoryError: no memory"), "drained"])
    assert "MemoryError: no\n  memory" in capsys.readouterr().err


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_a_signal_is_not_sent_as_an_error_of_the_worker(monkeypatch, capsys, signal):
    """Another worker would not meet it again, so the engine may start one."""
    assert end_of_a_worker(monkeypatch, signal) == (1, [])
    assert type(signal).__name__ in capsys.readouterr().err


def test_an_engine_that_has_closed_its_side_is_no_error(monkeypatch, capsys):
    assert end_of_a_worker(monkeypatch, EOFError()) == (0, [])
    assert capsys.readouterr().err == ""


def test_the_text_of_an_error_that_is_sent_is_limited(monkeypatch, capsys):
    """All of it is in what the worker prints."""
    message = "x" * (2 * ERROR_CHARACTERS)
    _, [(kind, text), _] = end_of_a_worker(monkeypatch, RuntimeError(message))
    assert kind == "raised" and text == f"RuntimeError: {message}"[:ERROR_CHARACTERS]
    assert message in capsys.readouterr().err
