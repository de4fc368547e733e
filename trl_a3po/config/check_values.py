"""Each setting by itself, and the few that need one another: choices, types, ranges of numbers, checkpoints, the
training forward.

Guarantees: what passes has the type and the range that its help gives; nothing is changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_a3po.config.a3po_config import A3POConfig

LEAST_WHOLE_NUMBERS = {
    "max_staleness": 0,
    "compare_proximal_every": 0,
    "weight_sync_steps": 1,
    "max_attempts": 1,
    "engine_slots": 1,
    "engine_threads": 1,
    "engine_restarts": 0,
    "engine_max_prompt_tokens": 1,
    "delivery_check_steps": 0,
    "reward_workers": 0,
    "max_rejected_groups_in_a_row": 1,
}
ABOVE_ZERO = ("reward_timeout", "vllm_outage_timeout", "stall_timeout", "asympo_min_scale", "temperature")
FLAGS = ("deterministic", "drop_zero_variance_groups", "dry_run")


def check_choices(config: "A3POConfig", choices: Mapping[str, Sequence[str]]) -> None:
    """Raise `ValueError` for a setting that is none of its `choices`, by name."""
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known: set one of {', '.join(map(repr, known))}.")


def check_types(config: "A3POConfig") -> None:
    """Raise `ValueError` for a flag that is not a `bool`, and for a text, or a list of them, that is none."""
    for name in FLAGS:
        value = getattr(config, name)
        if type(value) is not bool:  # "no" would count as True
            raise ValueError(f"{name}={value!r} must be True or False.")
    device = config.engine_device
    if not (device is None or _is_text(device) or _is_texts(device)):
        example = f"cuda:{device}" if type(device) is int and device >= 0 else "cuda:0"
        raise ValueError(
            f"engine_device={device!r} must be the name of a device, such as {example!r}, or a list of names; leave "
            "it out to follow the trainer."
        )
    urls = config.vllm_server_urls
    if not (urls is None or _is_text(urls) or _is_texts(urls)):
        raise ValueError(
            f"vllm_server_urls={urls!r} must be a list of URLs, such as ['http://localhost:8000']; leave it out to "
            "have a server started."
        )
    for name, what, default in (
        ("vllm_weights_dir", "the path of a folder, as text", "output_dir/vllm"),
        ("vllm_python", "the path of an interpreter, as text", "this one"),
    ):
        value = getattr(config, name)
        if not (value is None or _is_text(value)):
            raise ValueError(f"{name}={value!r} must be {what}; leave it out for {default}.")


def check_checkpoints(config: "A3POConfig") -> None:
    """Raise `ValueError` for checkpoints that could not be resumed from."""
    if config.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True would leave machines with checkpoints that lack the queue, which the main process "
            "alone writes: set save_on_each_node=False, and output_dir to a folder that they share."
        )


def check_numbers(config: "A3POConfig") -> None:
    """Raise `ValueError` for a number outside its range; `None` is allowed where it is the default."""
    optional = {setting.name for setting in fields(config) if setting.default is None}
    for name, low in LEAST_WHOLE_NUMBERS.items():
        value = getattr(config, name)
        if not ((type(value) is int and value >= low) or (value is None and name in optional)):
            raise ValueError(f"{name}={value!r} must be a whole number of at least {low}.")
    for name in ABOVE_ZERO:
        value = getattr(config, name)
        if not ((_is_number(value) and 0 < value < math.inf) or (value is None and name in optional)):
            raise ValueError(f"{name}={value!r} must be a finite number above 0.")
    if not (_is_number(config.spo_negative_scale) and 0 <= config.spo_negative_scale <= 1):
        raise ValueError(f"spo_negative_scale={config.spo_negative_scale!r} must be a number from 0 to 1.")
    for name, range_, holds in (
        ("masked_is_lower", "at least 0 and below 1", lambda value: 0 <= value < 1),
        ("masked_is_upper", "above 1", lambda value: 1 < value < math.inf),
        ("aipo_cap", "above 1", lambda value: 1 < value < math.inf),
        ("m2po_threshold", "above 0", lambda value: 0 < value < math.inf),
    ):
        value = getattr(config, name)
        if not (_is_number(value) and holds(value)):
            raise ValueError(f"{name}={value!r} must be a finite number {range_}.")
    _check_cap(config)
    if config.reward_on_timeout is not None:
        _check_reward_on_timeout(config)


def check_forward(config: "A3POConfig") -> None:
    """Raise `ValueError` for a prompt that is to be shared where no two completions of it meet."""
    if config.shared_prompt != "on":
        return
    if config.packed_forward == "off":
        raise ValueError(
            "shared_prompt='on' with packed_forward='off' cannot hold, because a prompt is shared in a packed "
            "row: set packed_forward='auto', or shared_prompt='off'."
        )
    if config.per_device_train_batch_size == 1:
        raise ValueError(
            "shared_prompt='on' with per_device_train_batch_size=1 has nothing to share: set it to "
            f"num_generations={config.num_generations}, or to a part or a multiple of it, or set "
            "shared_prompt='auto'."
        )


def _check_cap(config: "A3POConfig") -> None:
    if not _is_number(config.behavior_weight_cap):
        raise ValueError(
            f"behavior_weight_cap={config.behavior_weight_cap!r} must be a number above 1; set "
            "behavior_weight_mode='none' for no cap."
        )
    if config.behavior_weight_mode != "none" and not config.behavior_weight_cap > 1:
        raise ValueError(
            f"behavior_weight_cap={config.behavior_weight_cap!r} would change tokens whose policies agree (w = 1): "
            "set a cap above 1, or behavior_weight_mode='none' for no cap."
        )


def _check_reward_on_timeout(config: "A3POConfig") -> None:
    value = config.reward_on_timeout
    if not (_is_number(value) and math.isfinite(value)):
        raise ValueError(f"reward_on_timeout={value!r} must be a finite number; None rejects the group.")
    if config.reward_timeout is None:
        raise ValueError(
            f"reward_on_timeout={value!r} without a reward_timeout would never be used for a function that hangs: "
            "set reward_timeout, or leave reward_on_timeout out."
        )
    if not config.reward_workers:
        raise ValueError(
            f"reward_on_timeout={value!r} with reward_workers=0 cannot be used, because a thread that hangs "
            "cannot be killed: set reward_workers to 1 or more, or leave reward_on_timeout out."
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
