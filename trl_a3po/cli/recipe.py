"""Find the functions that a recipe names: reward functions, and functions that make a dataset.

Guarantees: a name stands for a function of an importable module (`package.module.function`), or of a Python file
(`file.py:function`), which is looked for in the folder of the recipe and then in the current one; an error about a
name says where the function was looked for.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from trl.import_utils import is_math_verify_available

TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
NEED_MATH_VERIFY = TRL_REWARDS[:2]


def find_function(name: str, setting: str, folders: Sequence[Path]) -> Callable[..., Any]:
    """The function called `name`, as the module's docstring says.

    Args:
        setting: the setting that holds the name, for error messages.
        folders: where to look for files, in this order.

    Raises:
        ValueError: there is no such file, module or function.
    """
    if ":" in name:
        file, _, attribute = name.rpartition(":")
        module = _load(file, setting, name, folders)
    elif "." in name:
        module_name, _, attribute = name.rpartition(".")
        module = _import(module_name, setting, name)
    else:
        raise ValueError(
            f"{setting}={name!r} does not say where the function is: write 'file.py:function' or "
            "'package.module.function'."
        )
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if function is None or not callable(function):
        raise ValueError(f"{setting}={name!r} was not found: {module.__name__!r} has no function {attribute!r}.")
    return function


def find_rewards(names: Sequence[str], folders: Sequence[Path]) -> list[Callable[..., Any]]:
    """The reward functions called `names`: TRL's reward functions without settings (`accuracy_reward`,
    `reasoning_accuracy_reward`, `think_format_reward`), and functions that `find_function` finds.

    Raises:
        ValueError: `names` is empty, or a function is not found or needs a package that is not installed.
    """
    if not names:
        raise ValueError(
            f"reward_funcs is empty: name at least one of {', '.join(map(repr, TRL_REWARDS))}, 'file.py:function' or "
            "'package.module.function'."
        )
    return [_reward(name, folders) for name in names]


def _reward(name: str, folders: Sequence[Path]) -> Callable[..., Any]:
    if name in NEED_MATH_VERIFY and not is_math_verify_available():
        raise ValueError(
            f"reward_funcs has {name!r}, which needs the package math-verify: run `pip install math-verify`, or name "
            "a function of your own."
        )
    if name in TRL_REWARDS:
        function: Callable[..., Any] = getattr(importlib.import_module("trl.rewards"), name)
        return function
    return find_function(name, "reward_funcs", folders)


def _load(file: str, setting: str, name: str, folders: Sequence[Path]) -> ModuleType:
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if path is None:
        raise ValueError(
            f"{setting}={name!r} was not found: there is no {file!r} in "
            f"{' or in '.join(str(folder) for folder in folders)}."
        )
    known = f"trl_a3po_recipe_{path.resolve().as_posix().strip('/').replace('/', '_').removesuffix('.py')}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{setting}={name!r} cannot be imported: {path} is not a Python file.")
    module = sys.modules[known] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # reward workers cannot import it by this name
    return module


def _import(module_name: str, setting: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ValueError(f"{setting}={name!r} was not found: there is no module {error.name!r}.") from error
        raise
