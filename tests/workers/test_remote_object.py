"""Objects in processes of their own: their methods, their exceptions, and their ends."""

import os
import signal
import sys
import threading
import time

import cloudpickle
import pytest

from tests.workers.processes import is_gone, until
from trl_a3po.workers.remote_object import ProcessEnded, RemoteError, RemoteObjects


class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self, k: int) -> int:
        self.count += k
        return self.count

    def where(self):
        return os.getpid(), threading.current_thread() is threading.main_thread()

    async def later(self, k):
        return k + 1

    def fails(self):
        raise ConnectionError("lost")

    def hangs(self):
        time.sleep(1000)

    def exits(self):
        sys.exit(3)

    def local(self):
        class Local:
            pass

        return Local()

    def close(self):
        with open(self.count, "a") as file:
            file.write("closed\n")

    def _hidden(self):
        pass


def ended(function, *arguments):
    with pytest.raises(ProcessEnded) as raised:
        function(*arguments)
    return str(raised.value)


@pytest.fixture
def objects():
    made = RemoteObjects()
    yield made
    made.end()
    until(lambda: not made._processes)


def of(factory):
    return cloudpickle.dumps(factory)


@pytest.fixture
def counter(objects):
    return objects.make(of(Counter))


def test_methods_answer_from_another_process_and_keep_their_state(counter):
    assert [counter.add(2), counter.add(k=3), counter.later(1)] == [2, 5, 2]
    pid, is_main = counter.where()
    assert pid != os.getpid() and is_main
    assert type(counter).__name__ == "Counter" and not hasattr(type(counter), "_hidden")
    assert type(counter.local()).__name__ == "Local"


def test_an_exception_keeps_its_name_and_its_text_and_the_object_goes_on(counter):
    with pytest.raises(RemoteError, match="lost") as raised:
        counter.fails()
    assert repr(raised.value) == "ConnectionError('lost')" and "in fails" in str(raised.value.__cause__)
    with pytest.raises(RemoteError, match=r"add\(\) got an unexpected keyword argument 'c'"):
        counter.add(c=1)
    assert counter.add(1) == 1


def test_a_call_that_hangs_blocks_no_call_of_another_thread(counter):
    counter.add(1)
    threading.Thread(target=ended, args=(counter.hangs,), daemon=True).start()
    answers = []
    thread = threading.Thread(target=lambda: answers.append((counter.add(1), counter.where()[1])))
    thread.start()
    thread.join(60)
    assert answers == [(2, False)]


@pytest.mark.parametrize("how, words", [("exits", "exit code 1"), ("killed", "SIGKILL")])
def test_the_end_of_a_process_is_said_by_the_call_and_by_the_next_one(counter, how, words):
    if how == "killed":
        pid, _ = counter.where()
        killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
        killer.start()
    with pytest.raises(ProcessEnded, match=words):
        counter.exits() if how == "exits" else counter.hangs()
    with pytest.raises(ProcessEnded, match="has ended"):
        counter.add(1)
    counter.close()


def test_close_is_called_and_the_process_ends(objects, tmp_path):
    path = tmp_path / "closed"
    made = objects.make(of(lambda: Counter(str(path))))
    pid, _ = made.where()
    made.close()
    made.close()
    assert path.read_text() == "closed\n" and is_gone(pid)


def test_a_factory_that_fails_or_exits_says_so(objects):
    with pytest.raises(RemoteError, match="unsupported operand"):
        objects.make(of(lambda: 1 + "a"))
    with pytest.raises(ProcessEnded, match="exit code 5"):
        objects.make(of(lambda: os._exit(5)))


def test_a_factory_that_hangs_ends_with_the_others(objects):
    errors = []
    hangs = threading.Thread(target=lambda: errors.append(ended(objects.make, of(lambda: time.sleep(1000)))))
    hangs.start()
    until(lambda: objects._processes)
    objects.end()
    hangs.join(60)
    assert len(errors) == 1
    with pytest.raises(ProcessEnded, match="the run has ended"):
        objects.make(of(Counter))
