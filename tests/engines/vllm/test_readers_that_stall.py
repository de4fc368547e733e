"""The process that makes calls, stopped: it is waited for, then replaced, and no token gets another's version."""

import os
import signal
import threading

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import finished, requests, started, until, update
from tests.engines.vllm.test_calls import reader_of
from trl_a3po.engines.vllm import calls, pool
from trl_a3po.engines.vllm.http import TimeoutFault
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import SamplingSettings

LONG = SamplingSettings(max_new_tokens=300, stop_token_ids=(1,))


@pytest.fixture
def running(tmp_path):
    """A server, an engine, and groups that have begun."""
    server = StubServer(step=0.01, max_model_len=4096)
    engine = started([server], tmp_path, sampling=LONG)
    engine.submit(requests(3))
    until(lambda: engine.stats().tokens > 20)
    yield server, engine
    engine.close()


def stop(server, engine) -> int:
    """Stop the reader while the server goes on; its id."""
    reader, tokens = reader_of(engine), server.tokens
    os.kill(reader, signal.SIGSTOP)
    until(lambda: server.tokens > tokens + 60)
    return reader


def test_what_was_sent_before_a_publish_is_read_first_also_when_that_takes_long(running):
    server, engine = running
    reader = stop(server, engine)
    threading.Timer(pool.SETTLE_TIMEOUT + 1, os.kill, (reader, signal.SIGCONT)).start()
    engine.publish(update(False, 1))
    finished(engine, 3)
    assert engine.stats().extra["calls_failed"] == 0
    assert engine.stats().extra["bounded_tokens"] == 0


def test_what_is_not_read_in_time_for_a_publish_is_sampled_again(running, monkeypatch):
    monkeypatch.setattr(pool, "SETTLE_TIMEOUT", 0.2)
    monkeypatch.setattr(pool, "CATCH_UP_TIMEOUT", 0.5)
    server, engine = running
    reader = stop(server, engine)
    engine.publish(update(False, 1))
    finished(engine, 3)
    assert engine.stats().extra["calls_failed"] == 3 and reader_of(engine) != reader


def test_a_reader_that_does_not_end_is_said(running, monkeypatch):
    """Or what it tells later would be of the next version."""
    server, engine = running
    reader = stop(server, engine)
    with monkeypatch.context() as patch:
        patch.setattr(calls.WorkerProcess, "kill", lambda self: None)
        patch.setattr(calls, "_END_TIMEOUT", 0.2)
        with pytest.raises(TimeoutFault, match=f"{reader}, was killed and did not end"):
            engine._serving.pool._calls.catch_up([0], 0.2)
    os.kill(reader, signal.SIGCONT)
    finished(engine, 3)


def test_a_reader_with_nothing_to_tell_is_not_taken_for_a_silent_one(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "SILENCE_TIMEOUT", 3.0)
    server = StubServer()
    server.faults = ["hang"]
    engine = started([server], tmp_path, request_timeout=5.0)
    try:
        engine.submit(requests(1))
        reader = reader_of(engine)
        finished(engine, 1)
        assert reader_of(engine) == reader and engine.stats().extra["timeouts"] == 1
    finally:
        engine.close()


def test_an_error_in_the_thread_that_reads_ends_the_run_and_the_reader(running, monkeypatch):
    _, engine = running
    monkeypatch.setattr(calls, "read_messages", lambda *args, **kwargs: 1 / 0)
    os.kill(reader_of(engine), signal.SIGKILL)  # the thread that reads the next reader fails
    until(lambda: engine._serving.pool.is_over())
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        while True:
            engine.wait(0.1)
