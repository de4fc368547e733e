"""`trl-a3po train RECIPE.yaml [--field value …]`: one training run from a file, as with TRL's scripts.

Guarantees: every field of `A3POConfig` and TRL's `ModelConfig` can be set in the recipe or on the command line, which
overrides the recipe; a name that is no field is refused before anything is built. At the end the model, its card and
`trainer_state.json` are in `output_dir`. For several processes: `accelerate launch -m trl_a3po train RECIPE.yaml`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_a3po.cli.options import OptionParser, SettingsError, check_names, check_rest
from trl_a3po.cli.recipe import find_function, find_rewards
from trl_a3po.cli.smoke import smoke_arguments, smoke_reward, smoke_rows
from trl_a3po.config import A3POConfig
from trl_a3po.trainer import A3POTrainer

ENVIRONMENT = "env"  # the part of a recipe from which TRL sets environment variables


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


class RecipeParser(OptionParser, TrlParser):
    """TRL's parser of a recipe and a command line, as `OptionParser` reads them."""


def make_parser(prog: str | None = None) -> RecipeParser:
    """The parser of `trl-a3po train`."""
    return RecipeParser((A3POScriptArguments, A3POConfig, ModelConfig), prog=prog)


def run(arguments: Sequence[str]) -> A3POTrainer:
    """Train with `arguments`: the path of the recipe, then `--field value` pairs. Returns the trainer, closed.

    Raises:
        SettingsError: the arguments are not a valid configuration.
    """
    script_args, training_args, model_args, folders = parse_command(arguments)
    return train(script_args, training_args, model_args, folders)


def parse_command(
    arguments: Sequence[str], others: Sequence[str] = ()
) -> tuple[A3POScriptArguments, A3POConfig, ModelConfig, list[Path]]:
    """What `arguments` say, as `run` takes them, and the folders in which to look for the files that they name.

    Args:
        others: names of options that the caller has taken out of the arguments, for messages.

    Raises:
        SettingsError: the arguments are not a valid configuration.
    """
    parser, folders = make_parser("trl-a3po train RECIPE.yaml"), [Path.cwd()]
    recipe, options = _recipe_and_options(arguments)
    settings: dict[str, Any] = {}
    if recipe is not None:
        settings = read_recipe(recipe)
        check_names(settings, [*parser.names, ENVIRONMENT])
        folders.insert(0, recipe.resolve().parent)
    given, rest = parser.parse_known_args(options)
    check_rest(rest, [*parser.names, *others])
    if given.smoke or settings.get("smoke") is True:
        # The options of the command line come later, and so override these.
        folder = given.output_dir or "outputs/smoke"
        options = ["--output_dir", folder, *smoke_arguments(folder), *options]
    try:
        # From here on the recipe's values are the defaults.
        parsed: Any = parser.parse_args_and_config([*(() if recipe is None else ("--config", str(recipe))), *options])
        return (*parsed, folders)
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(str(error)) from error
    except (TypeError, LookupError, AttributeError) as error:  # of dataclasses that do not check their values
        kind = type(error).__name__
        raise SettingsError(f"a setting has a value of a kind that it cannot have ({kind}: {error})") from error


def _recipe_and_options(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe, which comes first or after `--config`, and the other arguments."""
    options = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    recipes = [options.pop(0)] if options and not options[0].startswith("-") else []
    while "--config" in options:
        at = options.index("--config")
        recipes.extend(options[at + 1 : at + 2] or [""])
        del options[at : at + 2]
    if len(recipes) > 1:
        raise SettingsError(f"there are several recipes, {', '.join(recipes)}: give one.")
    return (Path(recipes[0]) if recipes else None), options


def read_recipe(recipe: Path) -> dict[str, Any]:
    """The settings in `recipe`. Raises `SettingsError` unless it is YAML, without tags that make objects, with a
    setting on each line."""
    if not recipe.is_file():
        raise SettingsError(f"there is no recipe {str(recipe)!r}.")
    try:
        values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SettingsError(f"{recipe} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise SettingsError(f"{recipe} is not a recipe: write one 'setting: value' on each line.")
    return values


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
    """The trainer of a run. Files that `script_args` names are looked for in `folders`.

    Raises:
        SettingsError: a setting of `script_args` or `model_args` names nothing, or cannot hold.
    """
    if model_args.model_name_or_path is None:
        raise SettingsError("model_name_or_path is not set: name a model, as a folder or on the hub.")
    if (model_args.load_in_4bit or model_args.load_in_8bit) and not model_args.use_peft:
        raise SettingsError(
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


def _datasets(script_args: A3POScriptArguments, training_args: A3POConfig, folders: Sequence[Path]) -> tuple[Any, Any]:
    """The rows to train on, and the rows to evaluate on, `None` if the run does not evaluate."""
    if script_args.smoke:
        return smoke_rows(), None
    if (script_args.dataset_name is None) == (script_args.dataset_function is None):
        raise SettingsError(
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
            raise SettingsError(
                f"The dataset has the splits {', '.join(made)}, but no {split!r}: choose one of these splits."
            )
    held_out = made[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None
    return made[script_args.dataset_train_split], held_out
