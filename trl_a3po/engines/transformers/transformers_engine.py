"""`TransformersEngine`: samples with the policy's own transformers forward, in a worker process.

Guarantees: those of `worker_engine.py`.
"""

from typing import Any, Literal

import cloudpickle

from trl_a3po.engines.transformers.worker import Setup
from trl_a3po.engines.worker_engine import WorkerEngine
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.weights import PolicySpec

WORKER = "trl_a3po.engines.transformers.worker"


class TransformersEngine(WorkerEngine):
    """An `Engine` whose worker decodes `slots` rollouts at a time with a replica of the policy.

    Args:
        slots: rollouts decoded at the same time.
        kv_on_publish: what happens to sequences in flight when weights change: "keep" their cache or "recompute" it.
        deterministic: tokens and log-probs are bit-equal whatever else is in the batch, at the price of padding.
        max_prompt_tokens: longest prompt accepted; needed with `deterministic`, which pads to it.
        worker: where the worker runs and what is waited for, as `WorkerEngine` takes it.
    """

    def __init__(
        self,
        *,
        slots: int,
        kv_on_publish: Literal["keep", "recompute"] = "keep",
        deterministic: bool = False,
        max_prompt_tokens: int | None = None,
        **worker: Any,
    ):
        super().__init__(WORKER, **worker)
        self._decoder = {
            "slots": slots,
            "kv_on_publish": kv_on_publish,
            "deterministic": deterministic,
            "max_prompt_tokens": max_prompt_tokens,
        }

    def worker_payload(self, spec: PolicySpec, sampling: SamplingSettings) -> bytes:
        payload: bytes = cloudpickle.dumps(Setup(spec, sampling, str(self._device), self._threads, self._decoder))
        return payload
