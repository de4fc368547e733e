"""Build a replica of the policy from a `PolicySpec`, and load `WeightUpdate`s into it.

Guarantees: a replica has exactly the names of the trained module (`named_weights`), so a name or shape that does not
fit raises instead of leaving a stale weight; nothing in it is random (parameters are uninitialised until the first
complete update, buffers that no update carries are computed from the configuration); parameters never move, so a
captured graph or a view of them stays valid.
"""

import copy

import torch
from accelerate import init_empty_weights
from torch import nn

from trl_a3po.protocol.weights import PolicySpec, WeightUpdate


def named_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> parameter or persistent buffer of `module`, each tensor once, under its first name."""
    weights: dict[str, torch.Tensor] = dict(module.named_parameters())
    seen: set[int] = set()
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                weights[f"{path}.{name}" if path else name] = buffer
    return weights


def build_replica(spec: PolicySpec, device: torch.device | str) -> nn.Module:
    """The policy's module on `device`, in `spec.dtype`, in eval mode, without gradients.

    Its parameters hold no values before `load_update` has loaded a complete update. Built without allocating or
    drawing weights, then tied as its configuration says.
    """
    with init_empty_weights(include_buffers=False):
        model = spec.model_class(copy.deepcopy(spec.config))
    # Registering a parameter as empty made a new one of it, which undid the ties of the constructor.
    model.tie_weights()
    if spec.peft_config is not None:
        from peft import get_peft_model  # several seconds of imports that a plain model does not need

        peft_config = copy.deepcopy(spec.peft_config)
        model = get_peft_model(
            model, peft_config, spec.adapter_name, autocast_adapter_dtype=False, low_cpu_mem_usage=True
        )
    _materialise(model, torch.device(device), spec.dtype)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def load_update(module: nn.Module, update: WeightUpdate) -> None:
    """Copy an update's tensors into `module` in place, converting their dtype.

    Raises:
        ValueError: a name the module does not have, a shape that differs, or, in a complete update, a name that is
            missing. Nothing has been changed then.
    """
    weights = named_weights(module)
    check_names(weights, update)
    for name, spec in update.specs.items():
        if weights[name].shape != spec.shape:
            raise ValueError(
                f"The update of version {update.version} has shape {tuple(spec.shape)} for {name!r}, but the "
                f"replica's is {tuple(weights[name].shape)}: the trained model no longer matches its configuration."
            )
    for name, tensor in update.tensors.items():
        weights[name].copy_(tensor)


def check_names(expected, update: WeightUpdate) -> None:
    """Raise `ValueError` if `update` has a name that is not in `expected` or, when complete, lacks one that is."""
    unknown = [name for name in update.tensors if name not in expected]
    if unknown:
        raise ValueError(
            f"The update of version {update.version} names {_some(unknown)}, which the engine's replica does not "
            "have: the trained model was changed after its PolicySpec was made, or differs from its configuration."
        )
    missing = [name for name in expected if name not in update.tensors] if update.complete else []
    if missing:
        raise ValueError(
            f"The complete update of version {update.version} lacks {_some(missing)}: the engine would sample from "
            "weights that were never trained. Send every parameter and persistent buffer."
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give empty parameters memory on `device`; one tensor for tied ones. Buffers move and keep their dtype."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                target = dtype if parameter.is_floating_point() else parameter.dtype
                empty = torch.empty(parameter.shape, dtype=target, device=device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            child._parameters[name] = made[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
