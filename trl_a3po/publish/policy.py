"""What an engine needs to rebuild the policy (`PolicySpec`) and to follow it (`WeightUpdate`).

Tensor names are those of the trained, unwrapped module (`PeftModel` included), so plain models, LoRA, DoRA and
`modules_to_save` travel the same way.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PolicySpec:
    """How to build a replica of the policy without weights.

    Args:
        model_class: the `PreTrainedModel` class of the base model.
        config: its configuration (an instance, ours to keep).
        dtype: dtype of the replica's forward.
        peft_config: the adapter's configuration when the policy is a `PeftModel`, else `None`.
        adapter_name: name of the trained adapter.
    """

    model_class: type
    config: Any
    dtype: torch.dtype
    peft_config: Any | None = None
    adapter_name: str = "default"


@dataclass(frozen=True)
class WeightUpdate:
    """The weights of one policy version.

    Args:
        version: the policy version.
        tensors: name -> detached tensor, possibly a live view of a trained parameter: an engine copies it before
            `start` or `publish` returns. Each storage appears once (tied weights under their first name).
        complete: every parameter and persistent buffer is there (the first update); otherwise only those that
            training changes.
    """

    version: int
    tensors: dict[str, torch.Tensor]
    complete: bool = True
