"""`WorkerEngine`: an engine that samples in a worker process of its own, whatever samples there.

Guarantees, beside those of `protocol/engine.py`: the worker is started by module name, so scripts without a `__main__`
guard, notebooks, and programs read from standard input work; weights travel through shared memory on a CPU and device
memory on a GPU, never through a disk; an update of an adapter moves only the adapter's bytes; the worker process never
outlives this process, and `close`, garbage collection and the exit of the interpreter all end it.

`publish` returns when the weights are copied on their own device; they may still be on their way to the worker, and
requests that come meanwhile wait for them.

Threads: those of the `Supervisor`.
"""

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from trl_a3po.engines.staging import Staging
from trl_a3po.engines.supervisor import Supervisor
from trl_a3po.engines.usage import NOT_STARTED, check_start, check_version_order
from trl_a3po.errors import EngineError
from trl_a3po.models.replica import check_names
from trl_a3po.protocol.engine import EngineEvent, EngineStats, GroupRequest, SamplingSettings
from trl_a3po.protocol.weights import PolicySpec, WeightUpdate
from trl_a3po.workers.process import WorkerProcess


class WorkerEngine:
    """An `Engine` whose worker runs `worker_loop.py`. A subclass says by `worker_payload` what the worker is told.

    Args:
        module: the module that the worker runs.
        device: the device of the replica, such as "cpu" or "cuda:1".
        staged_on: the device that weights are staged on; `None` for that of the replica.
        threads: CPU threads of the worker; `None` leaves the choice to torch.
        python, variables: see `WorkerProcess`.
        max_restarts: how often in a run a worker that died is restarted.
        start_timeout: seconds that `start` waits for the worker.
        publish_timeout: seconds that `publish` waits for the worker to load the weights that were published before.
    """

    def __init__(
        self,
        module: str,
        *,
        device: torch.device | str = "cpu",
        staged_on: torch.device | None = None,
        threads: int | None = None,
        python: str | None = None,
        variables: Mapping[str, str] | None = None,
        max_restarts: int = 3,
        start_timeout: float = 300.0,
        publish_timeout: float = 300.0,
    ):
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._staged_on = self._device if staged_on is None else staged_on
        self._threads = threads
        self._max_restarts = max_restarts
        self._new_worker = partial(WorkerProcess, module, threads=threads, python=python, variables=variables)
        self._start_timeout = start_timeout
        self._publish_timeout = publish_timeout
        self._supervisor: Supervisor | None = None
        self._staging: Staging | None = None
        self._version = 0
        self._publish_seconds = 0.0
        self._published_bytes = 0
        self._closed = False

    def worker_payload(self, spec: PolicySpec, sampling: SamplingSettings) -> bytes:
        """What the worker is told at its start, pickled. Raises `ValueError` for what the engine cannot sample."""
        raise NotImplementedError

    def start(self, spec: PolicySpec, sampling: SamplingSettings, update: WeightUpdate) -> None:
        check_start(update, used=self._supervisor is not None or self._closed)
        payload = self.worker_payload(spec, sampling)
        self._staging = Staging(update, spec.dtype, self._staged_on)
        self._version = update.version
        self._supervisor = Supervisor(
            partial(self._new_worker, inherit_fds=self._staging.fds),
            payload,
            self._staging,
            update.version,
            max_restarts=self._max_restarts,
        )
        weakref.finalize(self, self._supervisor.close)
        try:
            self._supervisor.start(self._start_timeout)
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._started().submit(requests)

    def wait(self, timeout: float) -> list[EngineEvent]:
        return self._started().wait(timeout)

    def cancel(self, request_ids: Sequence[int]) -> None:
        self._started().cancel(request_ids)

    def end_episodes(self, episodes: Sequence[int]) -> None:
        self._started().end_episodes(episodes)

    def publish(self, update: WeightUpdate) -> None:
        """See `Engine.publish`. Raises `ValueError` when the update does not fit the weights the engine holds, or is
        older than the version published last."""
        began = time.monotonic()
        supervisor = self._started()
        self._check(update)
        names = None if update.complete else tuple(update.tensors)
        supervisor.begin_writing(update.version, self._publish_timeout)
        try:
            self._published_bytes, arrival = self._started_staging().write(update)
        except BaseException as error:
            supervisor.fail_writing(update.version, error)
            raise
        supervisor.end_writing(update.version, names, None if arrival is None else arrival.wait)
        self._version = update.version
        self._publish_seconds = time.monotonic() - began

    def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], timeout: float
    ) -> tuple[list[float], int]:
        return self._started().score(prompt_ids, completion_ids, timeout)

    def stats(self) -> EngineStats:
        """`extra`: "worker_silence_seconds" since the worker last spoke (it does twice a second, except during a long
        decode step or while it starts), "published_bytes" of the last publish."""
        stats = self._started().stats()
        extra = stats.extra | {"published_bytes": float(self._published_bytes)}
        return replace(stats, publish_seconds=self._publish_seconds, extra=extra)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker; `None` while there is none."""
        return self._started().worker_pid

    def close(self) -> None:
        self._closed = True
        if self._supervisor is not None:
            self._supervisor.close()

    def _started(self) -> Supervisor:
        if self._supervisor is None:
            raise EngineError(NOT_STARTED)
        return self._supervisor

    def _started_staging(self) -> Staging:
        if self._staging is None:
            raise EngineError(NOT_STARTED)
        return self._staging

    def _check(self, update: WeightUpdate) -> None:
        shapes = self._started_staging().shapes
        check_names(shapes, update)
        for name, spec in update.specs.items():
            if tuple(spec.shape) != shapes[name]:
                raise ValueError(
                    f"The update of version {update.version} has shape {tuple(spec.shape)} for {name!r}, but the "
                    f"engine was started with {shapes[name]}: weights may not change their shape during a run."
                )
        check_version_order(update, self._version)
