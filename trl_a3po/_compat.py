"""The check that the installed TRL is supported: this package extends private methods of one minor version of TRL.

Guarantees: importing the package with another version raises, which needs only the metadata of TRL; importing the
trainer raises where a method that it wraps has other parameters, so a patch release that changes one cannot change the
training.
"""

import inspect
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

TRL_RANGE = ("1.16", "1.17")
INSTALL = 'pip install "trl>=1.16,<1.17"'

# The first parameters that each wrapped method must have, in order.
HOOKS = {
    "train": ("self", "resume_from_checkpoint"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_get_train_sampler": ("self", "dataset"),
    "_generate": ("self", "prompts"),
    "_tool_call_loop": (
        "self",
        "prompts",
        "prompt_ids",
        "completion_ids",
        "completions",
        "logprobs",
        "images",
        "multimodal_fields",
    ),
    "_get_tool_suffix_ids": ("self", "tool_messages"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_tokenize_prompts": ("self", "prompts"),
    "_get_per_token_logps_and_entropies": ("self", "model", "input_ids", "attention_mask", "logits_to_keep"),
    "_compute_loss": ("self", "model", "inputs"),
    "log": ("self", "logs", "start_time"),
}


def check_trl_version(installed: str | None = None) -> None:
    """Raise `ImportError` unless the installed TRL (or `installed`, a version string) is in the supported range."""
    low, high = TRL_RANGE
    if installed is None:
        try:
            installed = version("trl")
        except PackageNotFoundError:
            raise ImportError(f"trl_a3po needs TRL >={low},<{high}, but TRL is not installed: {INSTALL}") from None
    if not Version(low) <= Version(installed) < Version(high):
        raise ImportError(f"trl_a3po supports TRL >={low},<{high}, but {installed} is installed: {INSTALL}")


def check_trl_hooks(trainer_class: type) -> None:
    """Raise `ImportError` if a method that this package wraps is missing from `trainer_class` or has other
    parameters."""
    for name, expected in HOOKS.items():
        method = inspect.getattr_static(trainer_class, name, None)
        found = tuple(inspect.signature(method).parameters)[: len(expected)] if method is not None else None
        if found != expected:
            instead = "no such method" if found is None else found
            raise ImportError(
                f"trl_a3po wraps {trainer_class.__name__}.{name}{expected}, but the installed TRL {version('trl')} "
                f"has {instead}: {INSTALL}"
            )
