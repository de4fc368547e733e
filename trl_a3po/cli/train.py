"""`trl-a3po train RECIPE.yaml [--field value …]`: one training run from a file, as with TRL's scripts.

Guarantees: every field of `A3POConfig` and TRL's `ModelConfig` can be set in the recipe or on the command line, which
overrides the recipe; a field that does not exist raises an error. At the end the model, its card and
`trainer_state.json` are in `output_dir`. For several processes: `accelerate launch -m trl_a3po train RECIPE.yaml`.
"""

import argparse
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import yaml
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_a3po.cli.recipe import find_function, find_rewards
from trl_a3po.cli.smoke import smoke_arguments, smoke_reward, smoke_rows
from trl_a3po.config import A3POConfig
from trl_a3po.trainer import A3POTrainer


@dataclass
class A3POScriptArguments(ScriptArguments):
    """
    Arguments of `trl-a3po train` in addition to those of `A3POConfig` and `ModelConfig`.

    Parameters:
        dataset_function (`str`, *optional*):
            Function that makes the training dataset, as `file.py:function` (looked for beside the recipe, then in the
            current folder) or `package.module.function`. It is called without arguments. Instead of `dataset_name`.
        reward_funcs (`list[str]`, *optional*):
            `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward` (TRL's), or functions named as in
            `dataset_function`.
        smoke (`bool`, *optional*, defaults to `False`):
            Run the recipe on a tiny model and dataset that need no hub, for a few steps.
    """

    dataset_function: str | None = field(
        default=None,
        metadata={
            "help": "Function that makes the training dataset, as 'file.py:function' (looked for beside the recipe, "
            "then in the current folder) or 'package.module.function'. Instead of dataset_name."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "'accuracy_reward', 'reasoning_accuracy_reward', 'think_format_reward' (TRL's), or functions "
            "named as in dataset_function."
        },
    )
    smoke: bool = field(
        default=False,
        metadata={"help": "Run the recipe on a tiny model and dataset that need no hub, for a few steps."},
    )


def make_parser(prog: str | None = None) -> TrlParser:
    """The parser of `trl-a3po train`."""
    dataclasses: Any = (A3POScriptArguments, A3POConfig, ModelConfig)
    return TrlParser(dataclasses, prog=prog)


class SettingsError(ValueError):
    """A recipe or a command line holds a name that is not a setting, or settings that cannot hold."""


def run(arguments: Sequence[str]) -> A3POTrainer:
    """Train with `arguments`: the path of the recipe, then `--field value` pairs. Returns the trainer, closed.

    Raises:
        SettingsError: the arguments are not a valid configuration.
    """
    script_args, training_args, model_args, folders = parse_command(arguments)
    return train(script_args, training_args, model_args, folders)


def parse_command(arguments: Sequence[str]) -> tuple[A3POScriptArguments, A3POConfig, ModelConfig, list[Path]]:
    """What `arguments` say, as `run` takes them, and the folders in which to look for the files that they name.

    Raises:
        SettingsError: the arguments are not a valid configuration.
    """
    arguments = list(arguments)
    folders = [Path.cwd()]
    if arguments and not arguments[0].startswith("-"):
        recipe = Path(arguments.pop(0))
        if not recipe.is_file():
            raise SystemExit(f"trl-a3po train: there is no recipe {str(recipe)!r}.")
        check_recipe(recipe)
        folders.insert(0, recipe.resolve().parent)
        arguments = ["--config", str(recipe), *arguments]
    try:
        return (*_parse(arguments), folders)
    except ValueError as error:
        raise SettingsError(_readable(str(error))) from error
    except (TypeError, LookupError, AttributeError) as error:  # of dataclasses that do not check their values
        kind = type(error).__name__
        raise SettingsError(f"a setting has a value of a kind that it cannot have ({kind}: {error})") from error


def check_recipe(recipe: Path) -> None:
    """Raise `SettingsError` unless `recipe` is YAML, without tags that make objects, with a setting on each line."""
    try:
        values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SettingsError(f"{recipe} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise SettingsError(f"{recipe} is not a recipe: write one 'setting: value' on each line.")


def train(
    script_args: A3POScriptArguments, training_args: A3POConfig, model_args: ModelConfig, folders: Sequence[Path]
) -> A3POTrainer:
    """Train once. Files that `script_args` names are looked for in `folders`."""
    trainer = build_trainer(script_args, training_args, model_args, folders)
    resume = training_args.resume_from_checkpoint
    trainer.train({"true": True, "false": None}.get(str(resume).lower(), resume))  # a command line passes only text
    if not training_args.dry_run:
        trainer.save_model(training_args.output_dir)
        trainer.save_state()
        folder = training_args.output_dir
        trainer.accelerator.print(f"The model and its log are in {folder}; to see the run: trl-a3po plot {folder}")
        if training_args.push_to_hub:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.accelerator.end_training()
    return trainer


def build_trainer(
    script_args: A3POScriptArguments, training_args: A3POConfig, model_args: ModelConfig, folders: Sequence[Path]
) -> A3POTrainer:
    """The trainer of a run. Files that `script_args` names are looked for in `folders`."""
    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is not set: name a model, as a folder or on the hub.")
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not model_args.use_peft:
        raise ValueError(
            "load_in_4bit or load_in_8bit is set without use_peft, but quantised weights cannot be trained: set "
            "use_peft: true, which trains an adapter on them."
        )
    rewards = find_rewards(script_args.reward_funcs or [], folders)
    if script_args.smoke:
        rewards.append(smoke_reward)
    dataset, held_out = _datasets(script_args, training_args, folders)
    given: Any = training_args.model_init_kwargs or {}
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **given,
    }
    return A3POTrainer(
        model_args.model_name_or_path,
        rewards,
        args=training_args,
        train_dataset=dataset,
        eval_dataset=held_out,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )


def _readable(message: str) -> str:
    """TRL's message about a name that is not a setting, as a sentence with the most similar setting; any other message
    unchanged."""
    known = [f.name for kind in (A3POScriptArguments, A3POConfig, ModelConfig) for f in fields(kind)]
    for name in re.findall(r"'--(\w+)'", message):
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            return f"there is no setting {name!r}" + (f"; is it {nearest[0]!r}?" if nearest else ".")
    return message


def _parse(arguments: list[str]) -> tuple[A3POScriptArguments, A3POConfig, ModelConfig]:
    if "--smoke" in arguments:
        small = argparse.ArgumentParser(add_help=False)
        small.add_argument("--output_dir", default="outputs/smoke")
        folder = small.parse_known_args(arguments)[0].output_dir
        at = arguments.index("--config") + 2 if "--config" in arguments else 0
        # The arguments of the command line come later, and so override these.
        arguments = [*arguments[:at], "--output_dir", folder, *smoke_arguments(folder), *arguments[at:]]
    script_args, training_args, model_args = cast(
        tuple[Any, Any, Any], make_parser("trl-a3po train RECIPE.yaml").parse_args_and_config(arguments)
    )
    return script_args, training_args, model_args


def _datasets(script_args: A3POScriptArguments, training_args: A3POConfig, folders: Sequence[Path]) -> tuple[Any, Any]:
    """The rows to train on, and the rows to evaluate on, `None` if the run does not evaluate."""
    if script_args.smoke:
        return smoke_rows(), None
    if (script_args.dataset_name is None) == (script_args.dataset_function is None):
        raise ValueError(
            f"dataset_name={script_args.dataset_name!r} and dataset_function={script_args.dataset_function!r}: set "
            "exactly one of the two."
        )
    if script_args.dataset_function is not None:
        made = find_function(script_args.dataset_function, "dataset_function", folders)()
    else:
        made = load_dataset(
            script_args.dataset_name, script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    if not isinstance(made, dict):
        made = {script_args.dataset_train_split: made}
    for split in (script_args.dataset_train_split, script_args.dataset_test_split):
        needed = split == script_args.dataset_train_split or training_args.eval_strategy != "no"
        if needed and split not in made:
            raise ValueError(
                f"The dataset has the splits {', '.join(made)}, but no {split!r}: choose one of these splits."
            )
    held_out = made[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None
    return made[script_args.dataset_train_split], held_out
