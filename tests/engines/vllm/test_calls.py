"""The process that makes calls: what it dies of costs nothing, and nothing is left of it."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import SAMPLING, finished, requests, started, until, update
from trl_a3po.engines.vllm import calls, pool
from trl_a3po.engines.vllm.calls import CallRequest, Calls, Ended
from trl_a3po.engines.vllm.completions import completion_body
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFailed

BODY = completion_body(SAMPLING, "base", "", [5], count=1, done=0, stream=True)


def reader_of(engine) -> int:
    until(lambda: engine._serving.pool._calls._worker is not None)
    return engine._serving.pool._calls._worker.pid


@pytest.fixture
def ended() -> list[Ended]:
    """The ends that `reading` has told of."""
    return []


@pytest.fixture
def reading(ended):
    calls_of_a_test = Calls(lambda told: ended.extend(told.ended))
    yield calls_of_a_test
    calls_of_a_test.close()


@pytest.mark.parametrize("lora", [False, True], ids=["streamed", "whole"])
def test_a_reader_that_is_killed_loses_no_rollout_and_no_server(tmp_path, lora):
    (server,) = servers = [StubServer(lora=lora, step=0.02)]
    engine = started(servers, tmp_path)
    try:
        engine.submit(requests(3))
        until(lambda: server.tokens > 20)
        first = reader_of(engine)
        os.kill(first, signal.SIGKILL)
        finished(engine, 3)
        counts = engine.stats().extra
        assert counts["calls_failed"] == 3 and counts["servers_lost"] == 0
        assert reader_of(engine) != first
    finally:
        engine.close()


def test_a_reader_that_never_works_fails_the_group_with_its_words(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "READER", "trl_a3po.engines.vllm.no_such_module")
    monkeypatch.setattr(pool, "MOST_TRIES", 2)
    engine = started([StubServer()], tmp_path)
    try:
        engine.submit(requests(1))
        events = []
        until(lambda: events.extend(engine.wait(0.1)) or events)
        assert isinstance(events[0], GroupFailed)
        assert "process that reads vLLM's answers ended (exit code 1)" in events[0].reason
        assert "No module named" in events[0].reason
    finally:
        engine.close()


def test_a_reader_that_cannot_be_started_fails_what_it_was_to_do_and_is_tried_again(reading, ended, monkeypatch):
    server = StubServer()
    with monkeypatch.context() as patch:
        patch.setattr(calls, "WorkerProcess", refused)
        reading.make(CallRequest(1, server.url, BODY, 5.0))
        until(lambda: ended)
    assert "could not be started: [Errno 11] no more processes" in str(ended[0].fault)
    reading.make(CallRequest(2, server.url, BODY, 5.0))
    until(lambda: len(ended) == 2)
    assert ended[1] == Ended(2, None, None)


def refused(module: str):
    raise OSError(11, "no more processes")


def test_a_mistake_in_it_is_told_with_its_traceback(reading, ended):
    reading.make(CallRequest(7, "http://localhost:1", {}, 1.0))  # a body that says nothing
    until(lambda: ended)
    assert ended[0].number == 7 and ended[0].fault is None and "KeyError: 'n'" in ended[0].error


def test_what_a_server_answers_travels(reading, ended, tmp_path):
    """With its status, by which the pool tells a refusal from an accident."""
    server = StubServer()
    server.faults = ["500"]
    reading.make(CallRequest(1, server.url, BODY, 5.0))
    until(lambda: ended)
    assert ended[0].fault.status == 500 and "EngineCore encountered an issue" in str(ended[0].fault)


def test_a_call_that_is_ended_is_told_of_as_broken(reading, ended):
    server = StubServer()
    server.faults = ["hang"]
    reading.make(CallRequest(1, server.url, BODY, 60.0))
    until(lambda: server.served == 1 or not server.faults)
    reading.end(1)
    until(lambda: ended, timeout=10)  # the server would hang up after 20 s
    assert type(ended[0].fault).__name__ == "ConnectionFault"
    reading.end(1)  # it has ended: nothing


@pytest.mark.parametrize("folder", ["with_files", "removed"])
def test_the_folder_we_stand_in_does_not_matter(reading, ended, tmp_path, monkeypatch, folder):
    """In a notebook it is on the import path, and the library's modules are imported by then."""
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    if folder == "removed":
        Path.cwd().rmdir()
    else:
        for name in ("http", "json", "queue"):
            Path(f"{name}.py").write_text("raise ImportError('this is not the library')")
    server = StubServer()
    reading.make(CallRequest(1, server.url, BODY, 5.0))
    until(lambda: ended)
    assert ended[0] == Ended(1, None, None)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_copy_is_refused_and_its_end_ends_nothing(tmp_path):
    server = StubServer(step=0.02)
    engine = started([server], tmp_path)
    try:
        engine.submit(requests(2))
        until(lambda: server.tokens > 0)
        asked = list(server.calls)
        if (child := os.fork()) == 0:
            try:
                engine.close()
                engine.submit(requests(1, first=9))
            except EngineError as error:
                os._exit(7 if "was forked from it" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert server.calls == asked  # to pause, or to let go of what it serves
        finished(engine, 2)
        engine.publish(update(False, 1))
    finally:
        engine.close()
