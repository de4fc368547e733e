"""Calls, each in a thread: what comes of each is reported once."""

import os

import pytest

from tests.engines.vllm.stub_server import StubServer
from tests.engines.vllm.stubbed import SAMPLING, finished, requests, started, until, update
from trl_a3po.engines.vllm.servers.calls import CallRequest, Calls, Ended
from trl_a3po.engines.vllm.servers.completions import completion_body
from trl_a3po.errors import EngineError

BODY = completion_body(SAMPLING, "base", "", [5], count=1, done=0)


@pytest.fixture
def ended() -> list[Ended]:
    """The ends that `making` has reported."""
    return []


@pytest.fixture
def making(ended):
    calls_of_a_test = Calls(ended.append)
    yield calls_of_a_test
    calls_of_a_test.close()


def test_a_mistake_in_it_is_told_with_its_traceback(making, ended):
    server = StubServer()
    making.make(CallRequest(7, "seven", server.url, {"model": "base"}, 1.0))  # a body that says nothing
    until(lambda: ended)
    assert (ended[0].number == 7 and ended[0].fault) or "KeyError" in ended[0].error


def test_what_a_server_answers_travels(making, ended):
    """With its status, by which the pool tells a refusal from an accident."""
    server = StubServer()
    server.faults = ["500"]
    making.make(CallRequest(1, "one", server.url, BODY, 5.0))
    until(lambda: ended)
    assert ended[0].fault.status == 500 and "EngineCore encountered an issue" in str(ended[0].fault)


def test_a_call_that_is_ended_is_told_of_as_broken(making, ended):
    server = StubServer()
    server.faults = ["hang"]
    making.make(CallRequest(1, "one", server.url, BODY, 60.0))
    until(lambda: server.served == 1 or not server.faults)
    making.end(1)
    until(lambda: ended, timeout=10)  # the server would hang up after 20 s
    assert type(ended[0].fault).__name__ == "ConnectionFault"
    making.end(1)  # it has ended: nothing


def test_nothing_is_reported_after_the_end(making, ended):
    server = StubServer()
    server.faults = ["hang"]
    making.make(CallRequest(1, "one", server.url, BODY, 60.0))
    until(lambda: not server.faults)
    making.close()
    assert not ended


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
