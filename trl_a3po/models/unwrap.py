"""What is inside a policy as `GRPOTrainer` holds it: the base model, and the adapter that is trained.

Importing this module does not import peft, which takes several seconds.
"""

import sys
from typing import TYPE_CHECKING, cast

from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import PeftModel


def as_peft_model(model: nn.Module) -> "PeftModel | None":
    """`model` itself if it is a `PeftModel`, else `None`."""
    peft = sys.modules.get("peft")  # whoever made a `PeftModel` has imported peft
    return cast("PeftModel", model) if peft is not None and isinstance(model, peft.PeftModel) else None


def base_model(model: nn.Module) -> PreTrainedModel:
    """The `PreTrainedModel` inside `model`, which still holds any adapter layers."""
    peft_model = as_peft_model(model)
    return cast(PreTrainedModel, model if peft_model is None else peft_model.get_base_model())


def active_adapter(model: "PeftModel") -> str:
    """The name of the adapter that is trained.

    Raises:
        ValueError: the number of active adapters is not one.
    """
    adapters: list[str] = model.active_adapters
    if len(adapters) != 1:
        raise ValueError(
            f"The policy's active adapters are {adapters}, but exactly one can be trained: call "
            "`model.set_adapter(name)` first."
        )
    return adapters[0]
