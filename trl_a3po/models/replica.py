"""Builds a replica of the policy from a `PolicySpec`, and loads `WeightUpdate`s into it.

Guarantees: a replica has exactly the weight names of the trained module (`named_weights`), so a name or a shape that
does not fit raises an error instead of leaving a stale weight; nothing in a replica is random (parameters are
uninitialised until the first complete update, and buffers that no update carries are computed from the
configuration); parameters never move in memory, so a captured graph or a view of them stays valid; a parameter that
exists elsewhere on the device already is used where it is.
"""

import copy
from collections.abc import Collection, Mapping
from typing import TypeVar, cast

import torch
from accelerate import init_empty_weights
from torch import nn

from trl_a3po.protocol.weights import PolicySpec, WeightUpdate

Tensor = TypeVar("Tensor", bound=torch.Tensor)


def named_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer of `module` by name, and the buffers of adapters that a checkpoint leaves
    out: a replica cannot compute them, because they come from random numbers or from the base weights. A tensor that
    has several names appears once."""
    weights: dict[str, torch.Tensor] = dict(module.named_parameters())
    seen: set[int] = set()
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            carried = name not in child._non_persistent_buffers_set or type(child).__module__.startswith("peft.")
            if carried and id(buffer) not in seen:
                seen.add(id(buffer))
                weights[f"{path}.{name}" if path else name] = buffer
    return weights


def build_replica(
    spec: PolicySpec, device: torch.device | str, existing: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """The policy's module on `device`, in `spec.dtype`, in eval mode, and without gradients.

    The parameters are uninitialised until `load_update` has loaded a complete update, but for those that are in
    `existing`, by name, on `device` and in the dtype of the replica: these are used where they are.
    """
    model = empty_replica(spec)
    weights = named_weights(model)
    parameters = {
        id(weights[name]): nn.Parameter(tensor, requires_grad=False) for name, tensor in (existing or {}).items()
    }
    _materialise(model, torch.device(device), spec.dtype, parameters)
    return model.eval().requires_grad_(False)


def check_replica(spec: PolicySpec, shapes: Mapping[str, torch.Size]) -> None:
    """Check that a replica of `spec` can be built and has the weights that will be sent to it. Costs no memory.

    Args:
        shapes: shape of every weight of a complete update, by name.

    Raises:
        ValueError: the replica cannot be built, or has other weights.
    """
    adapter = "" if spec.peft_config is None else f" with a {type(spec.peft_config).__name__}"
    advice = "an engine cannot sample from this policy. " + (
        "Use another model."
        if spec.peft_config is None
        else "Use another adapter, such as LoraConfig on linear layers."
    )
    try:
        replica = empty_replica(spec)
    except Exception as error:  # whatever the model's or the adapter's own code raises
        raise ValueError(
            f"A {spec.model_class.__name__}{adapter} cannot be built without its weights "
            f"({type(error).__name__}: {str(error)[:150]}): {advice}"
        ) from error
    weights = named_weights(replica)
    for what, names in (
        ("lacks", [name for name in shapes if name not in weights]),
        ("has in addition", [name for name in weights if name not in shapes]),
        ("has in another shape", [name for name in weights if name in shapes and weights[name].shape != shapes[name]]),
        (
            "cannot compute",
            [name for name, buffer in replica.named_buffers() if buffer.is_meta and name not in weights],
        ),
    ):
        if names:
            raise ValueError(
                f"A {spec.model_class.__name__}{adapter} that is built from its configuration {what} "
                f"{_some(names)}: {advice}"
            )


def empty_replica(spec: PolicySpec) -> nn.Module:
    """The policy's module with parameters without memory."""
    from transformers.modeling_utils import set_zero3_state

    # Under ZeRO-3, a vision tower, which is made from its own configuration, would partition its weights.
    with init_empty_weights(include_buffers=False), set_zero3_state():
        model = spec.model_class(copy.deepcopy(spec.config))
    # `init_empty_weights` replaces every parameter by a new one, which undoes the ties made by the constructor.
    model.tie_weights()
    if spec.peft_config is not None:
        from peft import get_peft_model  # importing peft takes several seconds, which a plain model can do without

        peft_config = copy.deepcopy(spec.peft_config)
        model = get_peft_model(
            model, peft_config, spec.adapter_name, autocast_adapter_dtype=False, low_cpu_mem_usage=True
        )
    return cast(nn.Module, model)


@torch.no_grad()
def load_update(module: nn.Module, update: WeightUpdate) -> None:
    """Copy an update's tensors into `module` in place, converting their dtype. A tensor that the module itself has is
    left where it is.

    Raises:
        ValueError: the update has a name that the module does not have, or a shape that differs from the module's, or
            is complete and lacks a name. The module is unchanged.
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
        if weights[name].data_ptr() != tensor.data_ptr():
            weights[name].copy_(tensor)


def check_names(expected: Collection[str], update: WeightUpdate) -> None:
    """Check the names of an update against those of the weights that it is loaded into.

    Raises:
        ValueError: `update` has a name that is not in `expected`, or is complete and lacks a name that is.
    """
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


def _materialise(
    module: nn.Module, device: torch.device, dtype: torch.dtype, parameters: dict[int, nn.Parameter]
) -> None:
    """Give empty parameters and buffers memory on `device`, one tensor for tied ones. Other buffers move. Buffers keep
    their dtype. `parameters`: those to use, by the id of the empty one."""
    buffers: dict[int, torch.Tensor] = {}
    for child in module.modules():
        for name, parameter in _present(child._parameters):
            if id(parameter) not in parameters:
                parameters[id(parameter)] = _allocated(parameter, device, dtype)
            child._parameters[name] = parameters[id(parameter)]
        for name, buffer in _present(child._buffers):
            if id(buffer) not in buffers:
                empty = buffer.is_meta
                buffers[id(buffer)] = torch.empty_like(buffer, device=device) if empty else buffer.to(device)
            child._buffers[name] = buffers[id(buffer)]


def _present(tensors: Mapping[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _allocated(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter of the same shape, in `dtype` if it is a floating-point parameter."""
    target = dtype if parameter.is_floating_point() else parameter.dtype
    return nn.Parameter(torch.empty(parameter.shape, dtype=target, device=device), requires_grad=False)
