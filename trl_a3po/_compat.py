"""The check that the installed TRL is supported: this package extends private methods of one minor version of TRL.

Guarantees: importing the package with another version raises, which needs only the metadata of TRL; importing the
trainer raises where a method of TRL, transformers, accelerate or PEFT that it wraps or relies on has other parameters,
so a release that changes one cannot change the training.
"""

import inspect
from collections.abc import Iterator
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

# The same for methods of the transformers Trainer.
TRAINER_HOOKS = {
    "_get_dataloader": ("self", "dataset", "description", "batch_size", "sampler_fn"),
    "_prepare_for_training": ("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": ("self", "model", "epoch", "train_dataloader"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "evaluation_loop": ("self", "dataloader", "description"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_best_model": ("self",),
    "save_model": ("self", "output_dir", "_internal_call"),
    "create_accelerator_and_postprocess": ("self",),
    "get_tp_size": ("self",),
    "get_cp_size": ("self",),
    "get_sp_size": ("self",),
}
TESTED = {"transformers": "5.24", "accelerate": "1.15", "peft": "0.21"}


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


def check_hooks(trainer_class: type) -> None:
    """Raise `ImportError` if a method that this package wraps or calls is missing, or has other parameters.

    Args:
        trainer_class: TRL's.
    """
    for name, expected in HOOKS.items():
        _check_parameters("TRL", version("trl"), INSTALL, trainer_class, name, expected)
    for name, expected in TRAINER_HOOKS.items():
        _check_parameters(
            "transformers", version("transformers"), _install("transformers"), trainer_class, name, expected
        )
    for library, owner, name, expected in _borrowed():
        _check_parameters(library, version(library), _install(library), owner, name, expected)


def _borrowed() -> Iterator[tuple[str, type, str, tuple[str, ...]]]:
    """Methods of other libraries that are not part of their documented interface, or on which weights depend."""
    from accelerate import Accelerator
    from peft.tuners.lora import Embedding, Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    yield "accelerate", Accelerator, "unwrap_model", ("self", "model")
    yield "accelerate", Accelerator, "reduce", ("self", "tensor", "reduction")
    yield "accelerate", Accelerator, "autocast", ("self",)
    for layer in (Linear, Embedding):
        yield "peft", layer, "get_delta_weight", ("self", "adapter")
    yield "peft", BaseTunerLayer, "get_base_layer", ("self",)


def _install(library: str) -> str:
    tested = TESTED[library]
    return f'this package is tested with {library} {tested}: pip install "{library}=={tested}.*"'


def _check_parameters(
    library: str, installed: str, install: str, owner: type, name: str, expected: tuple[str, ...]
) -> None:
    method = inspect.getattr_static(owner, name, None)
    found = tuple(inspect.signature(method).parameters)[: len(expected)] if callable(method) else None
    if found != expected:
        instead = "no such method" if found is None else found
        raise ImportError(
            f"trl_a3po wraps {owner.__name__}.{name}{expected}, but the installed {library} {installed} has "
            f"{instead}: {install}"
        )
