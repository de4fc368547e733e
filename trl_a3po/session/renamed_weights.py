"""Loading a checkpoint in which transformers names the weights otherwise than the model does.

`save_pretrained` writes some architectures, such as Qwen2.5-VL, under the names of their first release, and
`from_pretrained` translates them. The Trainer loads a checkpoint by the names of the model, and only warns of the
others: a run would go on from the weights that it began with.

Guarantees: after `load_renamed`, the model has the weights of the checkpoint, or an error is raised.
"""

import json
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


def has_renamed(model: torch.nn.Module, folder: Path) -> TypeGuard[PreTrainedModel]:
    """Whether `folder` holds a whole model with names that `model` does not have."""
    return isinstance(model, PreTrainedModel) and not _names(folder) <= model.state_dict().keys()


def load_renamed(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights in `folder` into `model`, with the names translated.

    Raises:
        RuntimeError: the folder does not hold every weight of the model.
    """
    made: Any = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    loaded, info = made
    if wrong := [*info["missing_keys"], *info["unexpected_keys"]]:
        raise RuntimeError(
            f"{folder} does not hold the weights of this {type(model).__name__}, such as {sorted(wrong)[0]!r}: resume "
            "with the model of that run."
        )
    model.load_state_dict(loaded.state_dict())


def _names(folder: Path) -> set[str]:
    """The names of the weights of a whole model in `folder`."""
    index, whole = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.is_file():
        return set(json.loads(index.read_text())["weight_map"])
    if not whole.is_file():
        return set()
    with safe_open(whole, framework="pt") as weights:
        return set(weights.keys())
