"""Keeps a worker alive and its requests accounted for.

Guarantees: every request ends in one event, also when its worker dies; a request is sent behind the weights that were
published before it; weights are read by the worker only while nobody writes them; a dead worker is started again, at
most `max_restarts` times, and loads the weights published last.

One thread, "a3po-engine", starts the workers and does all waiting on them. Every method may be called from any
thread; `self._changed` guards the state and is notified of whatever a caller may wait for.
"""

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trl_a3po.engines.transformers.request_book import Asked
from trl_a3po.engines.transformers.staging import Staging
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import EngineEvent, EngineStats, GroupRequest
from trl_a3po.workers.channel import Channel
from trl_a3po.workers.listener import Listener
from trl_a3po.workers.process import WorkerProcess

logger = logging.getLogger(__name__)

WORKER = "trl_a3po.engines.transformers.worker"
_TICK = 0.2
_GRACE = 2.0


class Supervisor:
    """
    Args:
        payload: the worker's pickled `Setup`.
        staging: the memory the weights travel in; holds those of `version`.
        version: policy version of the weights in `staging`.
        threads: CPU threads of a worker.
        max_restarts: how often a worker that died is started again.
    """

    def __init__(self, payload: bytes, staging: Staging, version: int, *, threads: int | None, max_restarts: int):
        self._payload = payload
        self._staging = staging
        self._version = version
        self._threads = threads
        self._max_restarts = max_restarts
        self._owner = os.getpid()

        self._changed = threading.Condition()
        self._asked = Asked()
        self._stats = EngineStats()
        self._before = EngineStats()  # what earlier workers had counted
        self._worker: WorkerProcess | None = None
        self._built = False  # the worker waits for weights
        self._listening = False  # the worker has been told to load weights, so requests may follow
        self._loading = False  # the worker may be reading the staging memory
        self._writing = False  # the trainer is writing it
        self._ready_once = False
        self._heard = time.monotonic()
        self._error: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="a3po-engine", daemon=True)

    # --- what the engine calls -----------------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Start the first worker; returns when it is ready. Raises `EngineError` when it does not become so."""
        self._thread.start()
        with self._changed:
            ready = self._changed.wait_for(lambda: self._ready_once or self._error or self._closing, timeout)
            if not ready:
                words = self._worker.last_words if self._worker is not None else ""
                raise EngineError(
                    f"The engine's worker was not ready after start_timeout={timeout:g} seconds. Set a longer "
                    f"start_timeout if it was still at work. It printed:\n{words or '(nothing)'}"
                )
            self._raise_if_over()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        with self._changed:
            self._raise_if_over()
            self._asked.submit(requests, self._channel)

    def cancel(self, request_ids: Sequence[int]) -> None:
        with self._changed:
            self._asked.cancel(request_ids, self._channel)

    def wait(self, timeout: float) -> list[EngineEvent]:
        with self._changed:
            self._changed.wait_for(lambda: self._asked.has_events or self._error or self._closing, timeout)
            events = self._asked.take_events()
            if not events:
                self._raise_if_over()
            return events

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        """See `Engine.score`. Asked again of the next worker when one dies over it."""
        with self._changed:
            self._raise_if_over()
            key = self._asked.ask_score(prompt_ids, completion_ids, self._channel)
            self._changed.wait_for(lambda: self._asked.is_answered(key) or self._error or self._closing, timeout)
            answer = self._asked.forget(key)
            if answer is None:
                self._raise_if_over()
                raise EngineError(
                    f"The worker has not scored {len(completion_ids)} known tokens within {timeout:g} seconds. "
                    f"{self._situation()}"
                )
        logps, version = answer
        if isinstance(logps, str):
            raise ValueError(logps)
        return logps, version

    @contextlib.contextmanager
    def writing(self, version: int, names: tuple[str, ...] | None, timeout: float) -> Iterator[None]:
        """Write the staging memory inside; afterwards the worker loads `names` (`None`: everything) as `version`.

        Raises `EngineError` when the worker has not finished reading the weights before within `timeout` seconds.
        """
        with self._changed:
            free = self._changed.wait_for(lambda: not self._loading or self._error or self._closing, timeout)
            self._raise_if_over()
            if not free:
                raise EngineError(
                    f"Version {version} cannot be published: after publish_timeout={timeout:g} seconds the worker "
                    f"has still not loaded version {self._version}. {self._situation()}"
                )
            self._writing = True
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._writing = False
                self._end_with(f"Writing version {version} failed half-way ({error}), so the weights are mixed.")
            raise
        with self._changed:
            self._writing = False
            self._version = version
            if self._listening:
                self._load(names)
            elif self._built:
                self._load_all()

    def stats(self) -> EngineStats:
        with self._changed:
            now, before = self._stats, self._before
            return replace(
                now,
                tokens=now.tokens + before.tokens,
                busy_seconds=now.busy_seconds + before.busy_seconds,
                waiting_requests=now.waiting_requests + self._asked.unsent,
                extra={"worker_silence_seconds": time.monotonic() - self._heard},
            )

    @property
    def worker_pid(self) -> int | None:
        with self._changed:
            return None if self._worker is None else self._worker.pid

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked copy of the trainer owns no worker
            return
        with self._changed:
            self._closing = True
            if self._worker is not None:
                self._worker.channel.shutdown()
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * _GRACE)
        self._staging.close()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._start_worker():
                self._serve()
                self._end_worker()
        except BaseException:
            with self._changed:
                self._end_with(f"The engine's own thread failed:\n{traceback.format_exc()}")
                worker, self._worker = self._worker, None
            if worker is not None:
                worker.kill()
                worker.bury(0.0)

    def _start_worker(self) -> bool:
        with self._changed:
            if self._closing or self._error:
                return False
        worker = WorkerProcess(WORKER, inherit_fds=self._staging.fds, threads=self._threads)
        with self._changed:
            self._worker = worker
            self._heard = time.monotonic()
            worker.channel.send(("setup", self._payload, self._staging.handle()))
        return True

    def _serve(self) -> None:
        """Listen to the worker until it ends, or the engine is closed."""
        worker = self._worker
        with Listener(worker) as listener:
            while True:
                with self._changed:
                    if self._closing or self._error:
                        return
                    flushed = worker.channel.flush()
                listener.wait(_TICK, flushed=flushed)
                try:
                    messages = worker.channel.receive()
                except EOFError:
                    return
                if messages:
                    with self._changed:
                        self._heard = time.monotonic()
                        for message in messages:
                            self._take(message)
                        self._changed.notify_all()

    def _take(self, message: tuple) -> None:
        match message:
            case ("built",):
                self._built = True
                if not self._writing:
                    self._load_all()
            case ("loaded", _):
                self._loading = False
                self._ready_once = True
            case ("events", events):
                self._asked.ended(events)
            case ("scored", key, answer, version):
                self._asked.answer(key, (answer, version))
            case ("progress", tokens, busy_seconds, active_rollouts, waiting_requests):
                self._stats.tokens = tokens
                self._stats.busy_seconds = busy_seconds
                self._stats.active_rollouts = active_rollouts
                self._stats.waiting_requests = waiting_requests

    def _load(self, names: tuple[str, ...] | None) -> None:
        self._loading = True
        self._worker.channel.send(("load", self._version, names))

    def _load_all(self) -> None:
        """Give a new worker its weights, and the requests that came while there was none."""
        self._load(None)
        self._listening = True
        self._asked.send_rest(self._worker.channel)

    def _end_worker(self) -> None:
        """Bury the worker; account for what died with it; decide whether there will be another."""
        with self._changed:
            closing = self._closing or self._error is not None
            worker, self._worker = self._worker, None
            sent = self._asked.sent
            self._built = self._listening = self._loading = False  # from here on requests are kept for the next one
        if closing:
            worker.kill()
        end = worker.bury(_GRACE)
        with self._changed:
            self._before.tokens += self._stats.tokens
            self._before.busy_seconds += self._stats.busy_seconds
            self._stats = EngineStats(restarts=self._stats.restarts)
            if not closing:
                self._mourn(worker, end, sent & self._asked.sent)
            self._changed.notify_all()

    def _mourn(self, worker: WorkerProcess, end: str, lost: set[int]) -> None:
        words = worker.last_words
        last_line = words.splitlines()[-1] if words else "it printed nothing"
        self._asked.fail(lost, f"The engine's worker ended ({end}): {last_line}")
        told = f"It printed:\n{words or '(nothing)'}"
        if not self._ready_once:
            self._end_with(f"The engine's worker ended ({end}) before it was ready. {told}")
        elif self._stats.restarts == self._max_restarts:
            self._end_with(
                f"The engine's worker ended ({end}) after it had been started again max_restarts="
                f"{self._max_restarts} times. {told}"
            )
        else:
            self._stats.restarts += 1
            logger.warning(
                "The engine's worker ended (%s) and is started again, %d of max_restarts=%d; %d prompts in work are "
                "lost. Its last line: %s",
                end,
                self._stats.restarts,
                self._max_restarts,
                len(lost),
                last_line,
            )

    def _end_with(self, error: str) -> None:
        """The engine is beyond recovery; whatever is outstanding fails."""
        if self._error is None:
            self._error = error
        self._asked.fail_all(error.splitlines()[0])
        self._changed.notify_all()

    @property
    def _channel(self) -> Channel | None:
        """Where requests can be sent now."""
        return self._worker.channel if self._listening else None

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise EngineError(self._error)
        if self._closing:
            raise EngineError("The engine is closed.")

    def _situation(self) -> str:
        return (
            f"It was last heard {time.monotonic() - self._heard:.1f} seconds ago, with "
            f"{self._stats.active_rollouts} rollouts being decoded, {self._stats.waiting_requests} requests waiting "
            f"and {self._asked.outstanding} outstanding; it has been started again {self._stats.restarts} times."
        )
