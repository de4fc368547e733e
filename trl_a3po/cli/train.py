"""`trl-a3po train RECIPE.yaml [--field value …]`: one training run from a file, as with TRL's scripts.

Guarantees: every field of `A3POConfig` and TRL's `ModelConfig` can be set in the recipe or on the command line, which
overrides the recipe; a name that is no field is refused before anything is built. At the end the model, its card and
`trainer_state.json` are in `output_dir`. For several processes: `accelerate launch -m trl_a3po train RECIPE.yaml`.
"""

import argparse
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_a3po.cli.options import (
    OptionParser,
    SettingsError,
    check_names,
    check_rest,
    in_home,
    path_option,
    subject_and_options,
)
from trl_a3po.cli.recipe import find_function, find_rewards
from trl_a3po.cli.smoke import smoke_arguments, smoke_reward, smoke_rows
from trl_a3po.config import A3POConfig
from trl_a3po.config.check_kinds import check_kinds
from trl_a3po.rewards.users_frames import PACKAGE
from trl_a3po.trainer import A3POTrainer

ENVIRONMENT = "env"  # the part of a recipe from which TRL sets environment variables
TEXT_OR_LIST = [name for name, kind in get_type_hints(A3POConfig).items() if {str, list[str]} <= set(get_args(kind))]


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

    last_counts = True  # as in TRL: a launch script appends what overrides its own options

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        if names[0].removeprefix("--") in TEXT_OR_LIST:
            kwargs |= {"action": TextOrList, "nargs": "+"}
        return super().add_argument(*names, **kwargs)


class TextOrList(argparse.Action):
    """Stores one value as it is, and several as a list."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


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
    given_recipe, options = subject_and_options(arguments)
    recipe = None if given_recipe is None else path_option(given_recipe)
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
        script_args, training_args, model_args = parsed
        for settings_of, name in ((script_args, "dataset_name"), (model_args, "model_name_or_path")):
            if (value := getattr(settings_of, name)) is not None:
                setattr(settings_of, name, in_home(value))
        check_kinds(model_args)
        return script_args, training_args, model_args, folders
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(str(error)) from error
    except (TypeError, LookupError, AttributeError) as error:  # of dataclasses that do not check their values
        kind = type(error).__name__
        raise SettingsError(f"a setting has a value of a kind that it cannot have ({kind}: {error})") from error


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
    """Train once. Files that `script_args` names are looked for in `folders`.

    Raises:
        SettingsError: a setting, the data or the checkpoint name nothing, or cannot hold.
    """
    trainer = build_trainer(script_args, training_args, model_args, folders)
    resume = training_args.resume_from_checkpoint
    try:
        trainer.train(
            {"true": True, "false": None}.get(str(resume).lower(), resume)
        )  # a command line passes only text
    except ValueError as error:
        if trainer.state.global_step == 0 and _is_refusal(error):
            raise SettingsError(str(error)) from error
        raise
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
        SettingsError: a setting or the data name nothing, or cannot hold.
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
    try:
        return A3POTrainer(
            model_args.model_name_or_path,
            rewards,
            args=training_args,
            train_dataset=dataset,
            eval_dataset=held_out,
            peft_config=get_peft_config(model_args),
            quantization_config=get_quantization_config(model_args),
        )
    except (OSError, ValueError) as error:
        if _is_of_the_model(error, Path(model_args.model_name_or_path)):
            raise _cannot_be_had("model_name_or_path", model_args.model_name_or_path, error) from error
        if isinstance(error, ValueError) and _is_refusal(error):
            raise SettingsError(str(error)) from error
        raise


def _is_refusal(error: ValueError) -> bool:
    """Whether the library has raised it on purpose, so that its message says all that a person needs."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)


def _is_of_the_model(error: Exception, folder: Path) -> bool:
    """Whether transformers says that there is no model. Its `OSError` is of no subclass and has no number, unlike
    those of the system and of other libraries; a `ValueError` may be about anything else if there is a configuration.
    """
    if isinstance(error, OSError):
        return type(error) is OSError and error.errno is None
    return folder.is_dir() and not (folder / "config.json").exists()


def _cannot_be_had(setting: str, name: str, error: Exception) -> SettingsError:
    """What a library says of a model or dataset that it does not find."""
    why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    if Path(name).exists():
        return SettingsError(f"{setting} is {name!r}, which is there but cannot be loaded ({why}): correct the path.")
    if name.startswith(("/", "./", "../")):
        return SettingsError(f"{setting} is {name!r}, but there is no such file or folder: correct the path.")
    return SettingsError(
        f"{setting} is {name!r}, which is no folder here and cannot be had from the hub ({why}): correct the name, or "
        "see that this machine reaches the hub and may read what it asks for."
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
        try:
            made = load_dataset(
                script_args.dataset_name, script_args.dataset_config, streaming=script_args.dataset_streaming
            )
        except (FileNotFoundError, ConnectionError) as error:
            raise _cannot_be_had("dataset_name", str(script_args.dataset_name), error) from error
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
