"""Find the functions that a recipe names: reward functions, and functions that make a dataset.

Guarantees: a name stands for a function of an importable module (`package.module.function`), or of a Python file
(`file.py:function`), which is looked for in the folder of the recipe and then in the current one; an error about a
name is one sentence that says where the function was looked for, or where its module raised.
"""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from trl.import_utils import is_math_verify_available

from trl_a3po.cli.log_errors import Frame
from trl_a3po.cli.options import SettingsError, in_home
from trl_a3po.rewards.users_frames import PACKAGE, users_frames

TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
NEED_MATH_VERIFY = TRL_REWARDS[:2]


def find_function(name: str, setting: str, folders: Sequence[Path]) -> Callable[..., Any]:
    """The function called `name`, as the module's docstring says.

    Args:
        setting: the setting that holds the name, for error messages.
        folders: where to look for files, in this order.

    Raises:
        SettingsError: there is no such file, module or function, or it cannot be imported.
    """
    place, separator, attribute = name.rpartition(":" if ":" in name else ".")
    if not (place and attribute.isidentifier()):
        raise SettingsError(
            f"{setting}={name!r} does not say where the function is: write 'file.py:function' or "
            "'package.module.function'."
        )
    module = _load(place, setting, name, folders) if separator == ":" else _import(place, setting, name)
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if function is None or not callable(function):
        where = vars(module).get("__file__", place)
        raise SettingsError(f"{setting}={name!r} was not found: {where} has no function {attribute!r}.")
    return function


def find_rewards(names: Sequence[str], folders: Sequence[Path]) -> list[Callable[..., Any]]:
    """The reward functions called `names`: TRL's reward functions without settings (`accuracy_reward`,
    `reasoning_accuracy_reward`, `think_format_reward`), and functions that `find_function` finds.

    Raises:
        SettingsError: `names` is empty or no list, or a function is not found or needs a package that is not
            installed.
    """
    if isinstance(names, str):
        raise SettingsError(f"reward_funcs={names!r} is no list: write reward_funcs: [{names!r}].")
    if not names:
        raise SettingsError(
            f"reward_funcs is empty: name at least one of {', '.join(map(repr, TRL_REWARDS))}, 'file.py:function' or "
            "'package.module.function'."
        )
    return [_reward(name, folders) for name in names]


def _reward(name: str, folders: Sequence[Path]) -> Callable[..., Any]:
    if name in NEED_MATH_VERIFY and not is_math_verify_available():
        raise SettingsError(
            f"reward_funcs has {name!r}, which needs the package math-verify: run `pip install math-verify`, or name "
            "a function of your own."
        )
    if name in TRL_REWARDS:
        function: Callable[..., Any] = getattr(importlib.import_module("trl.rewards"), name)
        return function
    return find_function(name, "reward_funcs", folders)


def _load(file: str, setting: str, name: str, folders: Sequence[Path]) -> ModuleType:
    paths = [folder / in_home(file) for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise SettingsError(
            f"{setting}={name!r} was not found: there is no {file!r} in "
            f"{' or in '.join(str(folder) for folder in folders)}."
        )
    known = f"trl_a3po_recipe_{path.resolve().as_posix().strip('/').replace('/', '_').removesuffix('.py')}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{setting}={name!r} cannot be imported: {path} is not a Python file.")
    module = sys.modules[known] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[known]
        raise _not_imported(setting, name, error) from error
    cloudpickle.register_pickle_by_value(module)  # reward workers cannot import it by this name
    return module


def _import(module_name: str, setting: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise SettingsError(f"{setting}={name!r} was not found: there is no module {missing!r}.") from error
        raise _not_imported(setting, name, error) from error


def _not_imported(setting: str, name: str, error: BaseException) -> SettingsError:
    """What the module raised, and in which of the user's lines, or of an installed package that has the module."""
    frames = [
        Frame(frame.filename, frame.lineno or 0, None)
        for frame in traceback.extract_tb(users_frames(error.__traceback__))
        if not frame.filename.startswith(PACKAGE)
    ]
    users = [frame for frame in frames if not frame.is_of_a_library]
    if isinstance(error, SyntaxError) and error.filename is not None and not users:  # of the module itself
        users = [Frame(error.filename, error.lineno or 0, None)]
    raised = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    where = (users or [frame for frame in frames if "-packages" in frame.file])[-1:]
    return SettingsError(
        f"{setting}={name!r} cannot be imported: it raises {type(error).__name__}: {raised}"
        + "".join(f" ({frame})" for frame in where)
    )
