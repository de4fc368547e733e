"""How often the worker of an engine is started, by where it fails and how."""

from functools import partial

import pytest

from tests.workers.test_faults import NoStaging
from trl_a3po.engines.supervisor import Supervisor
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupFinished, GroupRequest
from trl_a3po.workers.process import WorkerProcess

RESTARTS = 1
TIMEOUT = 60.0


def outcome(folder, monkeypatch, moment: str, how: str) -> tuple[str, int, list]:
    """The error that ends an engine whose every worker fails alike, how many were started, and what became of two
    requests and of those that were submitted in the place of each that ended."""
    file = folder / "starts"
    monkeypatch.setenv("A3PO_TEST_WORKER", f"{file} {moment} {how}")
    new_worker = partial(WorkerProcess, "tests.engines.counted_worker", threads=1)
    supervisor, events = Supervisor(new_worker, b"", NoStaging(), 0, max_restarts=RESTARTS), []
    with pytest.raises(EngineError) as error:
        try:
            supervisor.start(TIMEOUT)
            assert supervisor.score((1,), (2, 3), TIMEOUT) == ([-1.0, -1.0], 0)  # as the delivery check at start does
            numbers = iter(range(100))
            supervisor.submit([GroupRequest(next(numbers), 0, (5,), 1) for _ in range(2)])
            while True:
                events += (new := supervisor.wait(TIMEOUT))
                supervisor.submit([GroupRequest(next(numbers), 0, (5,), 1) for _ in new])
        finally:
            supervisor.close()
    return str(error.value), len(file.read_text().splitlines()), events


@pytest.mark.parametrize("moment", ["building", "loading", "sampling"])
def test_what_a_worker_raises_before_any_worker_has_finished_a_group_ends_the_engine_at_once(
    tmp_path, monkeypatch, moment
):
    """Another worker would raise it again."""
    error, starts, events = outcome(tmp_path, monkeypatch, moment, "raises")
    assert starts == 1
    assert error.count(f"MemoryError: no memory for {moment}") >= 1 and "Traceback" in error
    assert len(events) == (2 if moment == "sampling" else 0)
    assert all(f"no memory for {moment}" in event.reason for event in events)


@pytest.mark.long
def test_a_worker_that_is_killed_while_it_samples_is_started_again(tmp_path, monkeypatch):
    error, starts, _ = outcome(tmp_path, monkeypatch, "sampling", "is_killed")
    assert starts == 1 + RESTARTS and f"engine_restarts={RESTARTS} times" in error


@pytest.mark.long
def test_a_worker_that_raises_once_it_has_finished_a_group_is_started_again(tmp_path, monkeypatch):
    error, starts, events = outcome(tmp_path, monkeypatch, "later", "raises")
    assert starts == 1 + RESTARTS and f"engine_restarts={RESTARTS} times" in error
    assert sum(isinstance(event, GroupFinished) for event in events) >= 1
