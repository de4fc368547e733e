"""How the trainer and the transformers engine share the cores of a CPU.

Guarantees: if no setting gives a number of threads, both together use as many threads as there are cores; the
trainer's number of threads is never raised, and is restored when training has ended.
"""

import os

import torch

from trl_a3po.config import A3POConfig


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine_threads(args: A3POConfig) -> int:
    """Threads of each worker of the transformers engine: `engine_threads`, or half of the cores, divided among the
    workers."""
    return args.engine_threads or max(1, cores() // 2 // max(1, len(args.engine_devices)))


class SharedCores:
    """Lowers this process's number of threads to what the engine leaves, until `restore`.

    Args:
        args: the trainer's settings.
        device: the trainer's device.
    """

    def __init__(self, args: A3POConfig, device: torch.device):
        self._before = torch.get_num_threads()
        workers = [torch.device(name) for name in args.engine_devices] or [device]
        on_cpu = sum(worker.type == "cpu" for worker in workers)
        if args.engine == "transformers" and args.engine_threads is None and device.type == "cpu" and on_cpu:
            left = max(1, cores() - on_cpu * engine_threads(args))
            torch.set_num_threads(min(self._before, left))

    def restore(self) -> None:
        torch.set_num_threads(self._before)
