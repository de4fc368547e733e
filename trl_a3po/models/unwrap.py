"""What is inside a policy as `GRPOTrainer` holds it: the base model, and the adapter that is trained."""

from typing import cast

from peft import PeftModel
from transformers import PreTrainedModel


def base_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The `PreTrainedModel` inside `model`, which still holds any adapter layers."""
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


def active_adapter(model: PeftModel) -> str:
    """Name of the adapter that is trained. Raises `ValueError` unless exactly one adapter is active."""
    adapters: list[str] = model.active_adapters
    if len(adapters) != 1:
        raise ValueError(
            f"The policy's active adapters are {adapters}, but exactly one can be trained: call "
            "`model.set_adapter(name)` first."
        )
    return adapters[0]
