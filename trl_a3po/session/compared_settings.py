"""The settings that decide what a checkpoint holds, in the groups that a resumed run treats in one way.

Guarantees: a setting that decides a saved number belongs to a group; `tests/session/test_compared_settings.py` fails
for a setting of `A3POConfig` that is neither in a group nor known to decide nothing that is saved.

- `order`: which rows follow in which batch. A run with other values is refused.
- `tokenizer`: what a token id means. A run with another tokenizer is refused.
- `prompts` and `sampling`: the tokens of prompts and of completions. With other values, finished groups are sampled
  again.
- `scoring`: the rewards. With other values, finished groups are scored again.
- `batch`: what TRL computes for a generation batch. Inside a generation batch, a run with other values of this group
  or of the three before it is refused.
"""

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from datasets import IterableDataset
from transformers import ProcessorMixin
from trl.trainer.utils import get_callable_name

from trl_a3po.session.sampling import sampling_settings

if TYPE_CHECKING:
    from trl_a3po.session.checkpoint_hooks import CheckpointHooks

Settings = dict[str, dict[str, Any]]  # group -> setting -> value

VOCABULARY, CHAT_TEMPLATE = DIGESTS = ("vocabulary of the tokenizer", "chat_template")
IMAGE_PROCESSOR = "processing_class.image_processor"
BATCH_SETTINGS = (
    "schedule",
    "objective",
    "proximal_method",
    "compare_proximal_every",
    "beta",
    "scale_rewards",
    "multi_objective_aggregation",
    "mask_truncated_completions",
)


def compared_settings(trainer: "CheckpointHooks") -> Settings:
    """The settings of `trainer` by group, as JSON returns them."""
    args, dataset, tokenizer = trainer.args, trainer.train_dataset, trainer._tokenizer
    policy = trainer.accelerator.unwrap_model(trainer.model)
    sampling = asdict(sampling_settings(args, trainer.generation_config, policy))
    del sampling["seed"], sampling["pad_token_id"]
    filters = args.drop_zero_variance_groups
    weights = trainer.reward_weights.tolist()
    groups = {
        "order": {
            "seed": args.seed,
            "shuffle_dataset": trainer.shuffle_dataset,
            "rows of train_dataset": None if isinstance(dataset, IterableDataset) else len(dataset),
            "generation_batch_size": args.generation_batch_size,
            "num_generations": args.num_generations,
            "steps_per_generation": args.steps_per_generation,
            "num_iterations": trainer.num_iterations,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
        },
        "tokenizer": {VOCABULARY: _digest(sorted(tokenizer.get_vocab().items()))},
        "prompts": {
            CHAT_TEMPLATE: _digest(trainer.chat_template or trainer.processing_class.chat_template),
            "chat_template_kwargs": trainer.chat_template_kwargs,
            IMAGE_PROCESSOR: _image_processor(trainer),
        },
        "sampling": {
            "max_completion_length": sampling.pop("max_new_tokens"),
            **sampling,
            "tools": [get_callable_name(tool) for tool in trainer.tools or ()],
            "environments": [str(name) for name in trainer.environment_factories or ()],
            "rollout_func": None if trainer.rollout is None else get_callable_name(trainer.rollout),
            "max_tool_calling_iterations": args.max_tool_calling_iterations,
        },
        "scoring": {
            "reward_funcs": trainer.reward_func_names,
            "on_group": "set" if trainer.on_group is not None else None,
            "drop_zero_variance_groups": filters,
            "reward_weights": weights if filters else None,
            "multi_objective_aggregation": args.multi_objective_aggregation if filters else None,
        },
        "batch": {name: getattr(args, name) for name in BATCH_SETTINGS} | {"reward_weights": weights},
    }
    as_json: Settings = json.loads(json.dumps(groups, default=repr))
    return as_json


def changed_settings(saved: Settings, now: Settings) -> dict[str, str]:
    """For each group that has changed, which settings have changed, with both values where these say something."""
    changed = {
        group: [
            _difference(name, saved[group].get(name), value)
            for name, value in settings.items()
            if saved[group].get(name) != value
        ]
        for group, settings in now.items()
    }
    return {group: ", ".join(settings) for group, settings in changed.items() if settings}


def _difference(name: str, saved: Any, now: Any) -> str:
    if name in DIGESTS:
        return f"another {name}"
    if name == IMAGE_PROCESSOR and isinstance(saved, dict) and isinstance(now, dict):
        names = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
        return ", ".join(f"{name}.{key}={saved.get(key)!r} (now {now.get(key)!r})" for key in names)
    return f"{name}={saved!r} (now {now!r})"


def _image_processor(trainer: "CheckpointHooks") -> dict[str, Any] | None:
    """What decides how images are prepared; `None` for a tokenizer."""
    processor = trainer.processing_class
    if not isinstance(processor, ProcessorMixin):
        return None
    settings: dict[str, Any] = json.loads(processor.image_processor.to_json_string())
    return settings


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
