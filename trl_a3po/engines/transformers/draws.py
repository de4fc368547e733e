"""Tokens that the device has been asked to draw and the host has not read yet.

Guarantees: draws are read in the order in which they were made; reading one waits for that draw and for nothing behind
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trl_a3po.engines.transformers.sequences import DecodedRollout


@dataclass(frozen=True, eq=False)
class Draw:
    """One token for each of `rollouts`.

    Args:
        rollouts: N of them.
        version: of the weights that gave the logits.
        drawn: `(2, N)` float64 on the host, tokens and log-probs; there once `arrived` has happened.
        arrived: `None` where the host computed them itself.
    """

    rollouts: Sequence[DecodedRollout]
    version: int
    drawn: torch.Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, rollouts: Sequence[DecodedRollout], version: int, drawn: torch.Tensor) -> "Draw":
        """`drawn`: on any device; it may be overwritten by what the device does next."""
        if drawn.device.type != "cuda":
            return cls(rollouts, version, drawn, None)
        host = drawn.to("cpu", non_blocking=True)
        # On the stream of the tensor's device, which need not be the current device.
        arrived = torch.cuda.current_stream(drawn.device).record_event()
        return cls(rollouts, version, host, arrived)

    def read(self) -> np.ndarray:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.drawn.numpy()
