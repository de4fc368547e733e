"""Many runs at the same time, on one or several GPUs, within a budget of seconds.

Guarantees: runs are begun in the order given; each worker process sees one GPU; a run that fails ends its worker
alone, which is replaced; when this returns, no worker is left. Runs are cut at the deadline.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

POLL = 0.5  # seconds


def run_parallel(
    work: Callable[[Any], None],
    items: Sequence[Any],
    *,
    gpus: Sequence[int],
    parallel: int,
    deadline: float,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Call `work` with every item, in `parallel` processes for each GPU, until `deadline` (of `time.monotonic`).

    Args:
        gpus: their numbers; none for a CPU, which counts as one.
        watch: called every half second.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    places = [gpu for _ in range(parallel) for gpu in (gpus or [None])][: len(items)]
    for item in [*items, *[None] * len(places)]:
        queue.put(item)

    def start(gpu: int | None) -> BaseProcess:
        process = context.Process(target=_worker, args=(work, queue, gpu))
        process.start()
        return process

    workers, failures = [(gpu, start(gpu)) for gpu in places], 0
    try:
        while workers and time.monotonic() < deadline:
            time.sleep(POLL)
            watch()
            for gpu, process in [one for one in workers if not one[1].is_alive()]:
                workers.remove((gpu, process))
                failures += bool(process.exitcode)
                if process.exitcode and failures <= len(items):
                    workers.append((gpu, start(gpu)))
    finally:
        for _, process in workers:
            process.kill()
        for _, process in workers:
            process.join()
        queue.cancel_join_thread()
    watch()


def _worker(work: Callable[[Any], None], queue: Any, gpu: int | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # before CUDA is used; a Trainer would take every visible GPU
    while (item := queue.get()) is not None:
        work(item)
        gc.collect()  # the memory of a run is free before the next begins
