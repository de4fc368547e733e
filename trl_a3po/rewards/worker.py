"""A process that runs reward functions: `python -m trl_a3po.rewards.worker SOCKET PARENT`, started by
`RewardWorkers` alone.

Guarantees: the functions run on the main thread, one group at a time, and keep their state from group to group; an
exception that they raise is sent back as text, and the process continues; the process ends when its parent does.

It receives the functions, once, and then groups. It sends `ready`, `column`, `scored` and `failed`, and `log` where a
function reads the trainer's log: then it receives what it does not have of it.
"""

import contextlib
import inspect
import pickle
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Group, Score
from trl_a3po.rewards.messages import pickled_score
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rewards.sent_log import ReceivedLog, StateInWorker
from trl_a3po.rewards.thread import CallingThread
from trl_a3po.rewards.users_frames import users_traceback
from trl_a3po.workers.channel import Channel
from trl_a3po.workers.process import parents_channel


def main() -> None:
    channel = parents_channel()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a worker is aborted for its stack, not for a core dump
    with contextlib.suppress(EOFError):  # the trainer has closed its end
        _serve(channel)


def _serve(channel: Channel) -> None:
    def send(*message: Any) -> None:
        channel.send(message)
        channel.drain()

    def added_to_log() -> Any:
        send("log")
        return pickle.loads(channel.receive_one())

    functions, names, processes, script = channel.receive_one()
    try:
        loaded = pickle.loads(functions)
        _share_script(loaded)
        scorer = _Scorer(loaded, names, processes, lambda column, values: send("column", column, values), added_to_log)
    except BaseException as error:
        send("failed", f"The reward functions cannot be loaded in a reward worker: {error!r}.", traceback.format_exc())
        return
    send("ready")
    while True:
        try:
            send("scored", scorer(*pickle.loads(channel.receive_one())))
        except EOFError:
            raise
        except RewardError as error:
            send("failed", str(error), users_traceback(error.__cause__ or error, script))
        except BaseException as error:
            send("failed", f"Scoring a group raised {error!r}.", users_traceback(error, script))


def _share_script(functions: list[Callable[..., Any] | None]) -> None:
    """Put what the functions use of the script's module into `__main__`, the module of that name here. A function may
    then hand it to processes of its own, which look it up by name."""
    here = vars(sys.modules["__main__"])
    for func in functions:
        while isinstance(func, partial):
            func = func.func
        called = func.__func__ if inspect.ismethod(func) else func if inspect.isfunction(func) else type(func).__call__
        if inspect.isfunction(called) and called.__module__ == "__main__":
            here.update({name: value for name, value in called.__globals__.items() if name not in here})


class _Scorer:
    """A `RewardScorer` that receives the completions and the trainer's state with each group, and asks for what was
    added to the trainer's log."""

    def __init__(
        self,
        functions: list[Callable[..., Any] | None],
        names: list[str],
        processes: int,
        on_column: Callable[[int, list[float]], None],
        added_to_log: Callable[[], tuple[int, list[dict[str, Any]]]],
    ):
        self._completions: list[Any] = []
        self._state = SimpleNamespace()
        self._added_to_log = added_to_log
        self._log = ReceivedLog()
        self._asking = threading.Lock()
        self._calls = 0  # as they begin and end
        self._scorer = RewardScorer(
            functions,
            names,
            lambda group: self._completions,
            lambda group: self._state,
            on_column=on_column,
            thread=CallingThread(),
            processes=processes,
        )

    def __call__(self, group: Group, completions: list[Any], state: SimpleNamespace) -> bytes:
        self._calls += 1
        self._completions, self._state = (
            completions,
            StateInWorker(partial(self._read_log, self._calls), **vars(state)),
        )
        try:
            score = self._scorer(group)
            assert isinstance(score, Score), "on a main thread, no function is moved"
            return pickled_score(score)
        finally:
            with self._asking:
                self._calls += 1

    def _read_log(self, call: int) -> list[dict[str, Any]]:
        """The log, during this call. Any thread of a function may read it."""
        with self._asking:
            if call != self._calls:
                raise RuntimeError(
                    "trainer_state.log_history was read after the reward functions had returned: read it while they "
                    "run, or set reward_workers=0."
                )
            return self._log.add(*self._added_to_log())


if __name__ == "__main__":
    main()
