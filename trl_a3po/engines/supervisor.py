"""Keeps a worker running, and accounts for every request.

Guarantees: every request ends in one event, also when its worker dies; a request is sent to the worker behind the
weights that were published before it; the worker reads weights only while nobody writes them; a dead worker is
restarted, at most `max_restarts` times, and loads the weights published last. A worker is not replaced that dies
before it is ready for the first time, or whose error ends it before any worker has finished a group: another one would
fail in the same way.

One thread, "a3po-engine", starts the workers and reads their messages; another one, "a3po-publish", waits for weights
on their way into the staging memory. Every method may be called from any thread; `self._changed` guards the state and
is notified of whatever a caller may wait for.
"""

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trl_a3po.engines.request_book import RequestBook
from trl_a3po.engines.staging import Staging
from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import EngineEvent, EngineStats, GroupFinished, GroupRequest
from trl_a3po.workers.channel import Channel
from trl_a3po.workers.process import WorkerProcess
from trl_a3po.workers.reading import WorkerEnded, WorkerUnusable, read_messages
from trl_a3po.workers.running_clock import wait_running

logger = logging.getLogger(__name__)

_END_TIMEOUT = 2.0  # seconds for a worker to end by itself
_SILENCE = 2.0  # seconds of silence after which a worker may be stopped
_LONG_SILENCE = 30.0  # seconds of silence that are named in a report


class Supervisor:
    """
    Args:
        new_worker: starts a worker, which runs `worker_loop.py`.
        payload: what the worker needs to know, pickled.
        staging: the memory the weights travel in; it holds the weights of `version`.
        version: policy version of the weights in `staging`.
        max_restarts: how often a worker that died is replaced.
    """

    def __init__(
        self,
        new_worker: Callable[[], WorkerProcess],
        payload: bytes,
        staging: Staging,
        version: int,
        *,
        max_restarts: int,
    ) -> None:
        self._new_worker = new_worker
        self._payload = payload
        self._staging = staging
        self._version = version
        self._max_restarts = max_restarts
        self._owner = os.getpid()

        self._changed = threading.Condition()
        self._requests = RequestBook()
        self._stats = EngineStats()
        self._before = EngineStats()  # what earlier workers had counted
        self._worker: WorkerProcess | None = None
        self._built = False  # the worker waits for weights
        self._accepts_requests = False  # the worker has been sent its weights, so requests may follow
        self._loading = False  # the worker may be reading the staging memory
        self._writing = False  # the trainer is writing it
        self._ready_once = False
        self._finished_once = False  # a worker has finished a group
        self._raised: str | None = None  # the error that ends the worker
        self._heard = time.monotonic()
        self._error: str | None = None
        self._closing = False
        self._publisher: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="a3po-engine", daemon=True)

    # --- what the engine calls -----------------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Start the first worker. Returns when it is ready; raises `EngineError` when it does not get ready."""
        self._thread.start()
        with self._changed:
            ready = self._wait(lambda: self._ready_once or self._error or self._closing, timeout)
            if not ready:
                output = self._worker.output_tail if self._worker is not None else ""
                raise EngineError(
                    f"The engine's worker was not ready after {timeout:g} seconds. It printed:\n"
                    f"{output or '(nothing)'}"
                )
            self._raise_if_over()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        with self._changed:
            self._raise_if_over()
            self._requests.submit(requests, self._channel)

    def cancel(self, request_ids: Sequence[int]) -> None:
        with self._changed:
            self._requests.cancel(request_ids, self._accepting)

    def end_episodes(self, episodes: Sequence[int]) -> None:
        with self._changed:
            if self._accepting is not None:  # another worker has kept nothing
                self._accepting.send(("end_episodes", list(episodes)))

    def wait(self, timeout: float) -> list[EngineEvent]:
        with self._changed:
            self._changed.wait_for(lambda: self._requests.has_events or self._error or self._closing, timeout)
            events = self._requests.take_events()
            if not events:
                self._raise_if_over()
            return events

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        """See `Engine.score`. When the worker dies before it answers, the next worker is asked."""
        with self._changed:
            self._raise_if_over()
            key = self._requests.request_score(prompt_ids, completion_ids, self._channel)
            self._wait(lambda: self._requests.is_answered(key) or self._error or self._closing, timeout)
            answer = self._requests.forget(key)
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

    def begin_writing(self, version: int, timeout: float) -> None:
        """From now on the staging memory may be written, until `end_writing`. Requests and scores that come meanwhile
        are kept until the worker has been sent the new weights.

        Raises:
            EngineError: the worker has not finished loading the previous version within `timeout` seconds.
        """
        with self._changed:
            free = self._wait(lambda: not (self._loading or self._writing) or self._error or self._closing, timeout)
            self._raise_if_over()
            if not free:
                raise EngineError(
                    f"Version {version} cannot be published: after publish_timeout={timeout:g} seconds the worker "
                    f"has still not loaded version {self._version}. {self._situation()}"
                )
            self._writing = True

    def end_writing(self, version: int, names: tuple[str, ...] | None, arrived: Callable[[], None] | None) -> None:
        """The worker loads `names` (`None`: everything) as `version`, once `arrived` has returned, which a thread of
        its own calls; `None`: they have arrived."""
        if arrived is None:
            self._send_version(version, names)
            return

        def wait_and_send() -> None:
            try:
                arrived()
            except BaseException as error:
                self.fail_writing(version, error)
            else:
                self._send_version(version, names)

        self._publisher = threading.Thread(target=wait_and_send, name="a3po-publish", daemon=True)
        self._publisher.start()

    def fail_writing(self, version: int, error: BaseException) -> None:
        with self._changed:
            self._writing = False
            self._end_with(f"Writing version {version} failed half-way ({error}), so the weights are mixed.")

    def _send_version(self, version: int, names: tuple[str, ...] | None) -> None:
        with self._changed:
            self._writing = False
            self._version = version
            if self._worker is not None and self._accepts_requests:
                self._load(self._worker, names)
                self._requests.send_rest(self._worker.channel)
            elif self._worker is not None and self._built:
                self._load_all(self._worker)
            # Otherwise the next worker loads everything.
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            now, before = self._stats, self._before
            is_stopped, silence = self._is_stopped(), time.monotonic() - self._heard
            return replace(
                now,
                tokens=now.tokens + before.tokens,
                turns_prefilled_again=now.turns_prefilled_again + before.turns_prefilled_again,
                busy_seconds=now.busy_seconds + before.busy_seconds,
                waiting_requests=now.waiting_requests + self._requests.unsent,
                is_stopped=is_stopped,
                trouble=self._trouble(silence, is_stopped),
                extra={"worker_silence_seconds": silence},
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
            self._thread.join(2 * _END_TIMEOUT)
        if self._publisher is not None:
            self._publisher.join(2 * _END_TIMEOUT)
        self._staging.close()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (worker := self._start_worker()) is not None:
                fault = self._serve(worker)
                self._end_worker(worker, fault)
        except BaseException:
            with self._changed:
                self._end_with(f"The engine's own thread failed:\n{traceback.format_exc()}")
                worker, self._worker = self._worker, None
            if worker is not None:
                worker.kill()
                worker.reap(0.0)

    def _start_worker(self) -> WorkerProcess | None:
        with self._changed:
            if self._is_over():
                return None
        worker = self._new_worker()
        with self._changed:
            self._worker = worker
            self._raised = None
            self._heard = time.monotonic()
            worker.channel.send(("setup", self._payload, self._staging.handle()))
        return worker

    def _is_over(self) -> bool:
        return self._closing or self._error is not None

    def _serve(self, worker: WorkerProcess) -> str | None:
        """Handle the worker's messages until it ends or the engine is closed. Returns what is wrong with a worker that
        has to be killed."""
        try:
            for message in read_messages(worker, until=self._is_over):
                with self._changed:
                    self._heard = time.monotonic()
                    self._handle_message(worker, message)
                    self._changed.notify_all()
        except WorkerEnded:
            return None
        except WorkerUnusable as fault:
            return str(fault)
        return None

    def _handle_message(self, worker: WorkerProcess, message: tuple[Any, ...]) -> None:
        match message:
            case ("built",):
                self._built = True
                if not self._writing:
                    self._load_all(worker)
            case ("loaded", _):
                self._loading = False
                self._ready_once = True
            case ("unusable", why):
                self._end_with(why)
            case ("raised", error):
                self._raised = error
            case ("events", events):
                self._finished_once |= any(isinstance(event, GroupFinished) for event in events)
                self._requests.ended(events)
            case ("scored", key, answer, version):
                self._requests.answer(key, (answer, version))
            case ("warning", text):
                logger.warning("%s", text)
            case ("progress", tokens, turns_prefilled_again, busy_seconds, active_rollouts, waiting_requests):
                self._stats.tokens = tokens
                self._stats.turns_prefilled_again = turns_prefilled_again
                self._stats.busy_seconds = busy_seconds
                self._stats.active_rollouts = active_rollouts
                self._stats.waiting_requests = waiting_requests

    def _load(self, worker: WorkerProcess, names: tuple[str, ...] | None) -> None:
        self._loading = True
        worker.channel.send(("load", self._version, names))

    def _load_all(self, worker: WorkerProcess) -> None:
        """Give a new worker its weights, and the requests that came while there was no worker."""
        self._load(worker, None)
        self._accepts_requests = True
        self._requests.send_rest(worker.channel)

    def _end_worker(self, worker: WorkerProcess, fault: str | None) -> None:
        """Reap the worker, and account for the requests that ended with it."""
        with self._changed:
            closing = self._is_over()
            self._worker = None
            sent = self._requests.sent
            # From here on requests are kept for the next worker.
            self._built = self._accepts_requests = self._loading = False
        if closing:
            worker.kill()
        how = worker.reap(_END_TIMEOUT, fault=fault)
        with self._changed:
            self._before.tokens += self._stats.tokens
            self._before.turns_prefilled_again += self._stats.turns_prefilled_again
            self._before.busy_seconds += self._stats.busy_seconds
            self._stats = EngineStats(restarts=self._stats.restarts)
            if not closing:
                self._handle_worker_death(worker, how, sent & self._requests.sent)
            self._changed.notify_all()

    def _handle_worker_death(self, worker: WorkerProcess, how: str, lost: set[int]) -> None:
        """Fail the requests that were lost with the worker; have another worker started, or end the engine."""
        output = worker.output_tail
        last_line = output.splitlines()[-1] if output else "it printed nothing"
        self._requests.fail(lost, f"The engine's worker ended ({how}): {last_line}")
        printed = f"It printed:\n{output or '(nothing)'}"
        if not self._ready_once:
            self._end_with(f"The engine's worker ended ({how}) before it was ready. {printed}")
        elif self._raised is not None and not self._finished_once:
            self._end_with(
                f"The engine's worker ended ({how}) before it had finished a group, because of an error that another "
                f"worker would meet as well ({self._raised}). {printed}"
            )
        elif self._stats.restarts == self._max_restarts:
            self._end_with(
                f"The engine's worker ended ({how}) after it had been restarted engine_restarts={self._max_restarts} "
                f"times. {printed}"
            )
        else:
            self._stats.restarts += 1
            logger.warning(
                "The engine's worker ended (%s) and is being restarted, restart %d of engine_restarts=%d; %d prompts "
                "in progress are lost. The worker's last line: %s",
                how,
                self._stats.restarts,
                self._max_restarts,
                len(lost),
                last_line,
            )

    def _end_with(self, error: str) -> None:
        """The engine is beyond recovery: every outstanding request fails."""
        if self._error is None:
            self._error = error
        self._requests.fail_all(error.splitlines()[0])
        self._changed.notify_all()

    @property
    def _channel(self) -> Channel | None:
        """Where requests can be sent now; `None` while there is no worker that accepts them, or while one has not been
        sent the weights that were published last."""
        return None if self._writing else self._accepting

    @property
    def _accepting(self) -> Channel | None:
        return self._worker.channel if self._worker is not None and self._accepts_requests else None

    def _wait(self, done: Callable[[], object], timeout: float) -> bool:
        """Wait until `done`, for `timeout` seconds in which neither this process nor the worker is stopped."""
        return wait_running(self._changed, done, timeout, self._is_stopped)

    def _is_stopped(self) -> bool:
        # A worker speaks twice a second, so one that has just spoken need not be looked at.
        silent = time.monotonic() - self._heard > _SILENCE
        return silent and self._worker is not None and self._worker.is_stopped

    def _trouble(self, silence: float, is_stopped: bool) -> str:
        if self._worker is None or (silence < _LONG_SILENCE and not is_stopped):
            return ""
        if is_stopped:
            return f"its worker {self._worker.how_to_continue}"
        return f"its worker (process {self._worker.pid}) has said nothing for {silence:.0f} s"

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise EngineError(self._error)
        if self._closing:
            raise EngineError("The engine is closed.")

    def _situation(self) -> str:
        return (
            f"Its last message came {time.monotonic() - self._heard:.1f} seconds ago, with "
            f"{self._stats.active_rollouts} rollouts being decoded, {self._stats.waiting_requests} requests waiting "
            f"and {self._requests.outstanding} requests outstanding; it has been restarted {self._stats.restarts} "
            "times."
        )
