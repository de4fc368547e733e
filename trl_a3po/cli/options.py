"""How the commands read their options: by whole names, and with one sentence about what they do not know.

Guarantees: no abbreviation stands for an option, so a typing error never sets another one; every option can be written
with dashes for underscores; what is no option is named with the option that is most like it; whatever argparse refuses
is a `SettingsError` of one sentence.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class SettingsError(ValueError):
    """A recipe or a command line holds a name that is not a setting, or settings that cannot hold."""


class OptionParser(argparse.ArgumentParser):
    """Takes options by their whole names, and raises `SettingsError` where argparse prints its usage."""

    last_counts = False  # of an option that is given twice

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs | {"allow_abbrev": False})

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        dashed = [name.replace("_", "-") for name in names if name.startswith("--")]
        return super().add_argument(*dict.fromkeys([*names, *dashed]), **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args is not None and not self.last_counts:
            self._refuse_repeated(args)
        return super().parse_known_args(args, namespace)

    def _refuse_repeated(self, arguments: Sequence[str]) -> None:
        """Raise `SettingsError` for an option that is given twice and would keep its last value alone."""
        seen: set[str] = set()
        for word in arguments:
            name = word.partition("=")[0]
            action = self._option_string_actions.get(name)
            if action is None or action.nargs == 0 or isinstance(action, argparse._AppendAction):
                continue
            if action.dest in seen:
                raise SettingsError(f"{name} is given twice, but only one of them could count: leave one out.")
            seen.add(action.dest)

    def error(self, message: str) -> NoReturn:
        # "argument --a_b/--a-b: expected one argument" names the option twice.
        raise SettingsError(re.sub(r"^argument (-[^/:\s]+)[^:\s]*: ", r"\1: ", message))

    @property
    def names(self) -> list[str]:
        """The names of the options, as a recipe writes them."""
        return [action.dest for action in self._actions if action.option_strings and action.dest != "help"]


def in_home(path: str) -> str:
    """`path`, with the home folder in place of a `~` that no shell has replaced: in a recipe, and as in
    `--output=~/file`."""
    return os.path.expanduser(path)


def path_option(text: str) -> Path:
    """The path that an option or a recipe gives."""
    return Path(in_home(text))


def subject_and_options(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """What a command is about, such as a recipe, which comes first or after `--config`, and the other arguments."""
    options = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    given = [options.pop(0)] if options and not options[0].startswith("-") else []
    while "--config" in options:
        at = options.index("--config")
        if at + 1 == len(options):
            raise SettingsError("--config: expected one argument")
        given.append(options[at + 1])
        del options[at : at + 2]
    if len(given) > 1:
        raise SettingsError(f"there are several recipes, {', '.join(given)}: give one.")
    return (given[0] if given else None), options


def check_names(names: Iterable[str], known: Sequence[str]) -> None:
    """Raise `SettingsError` for the first of the names in a recipe that is not `known`."""
    for name in names:
        if name not in known:
            raise SettingsError(f"there is no setting {name!r}{_question(name, known, '')}")


def check_rest(rest: Sequence[str], known: Sequence[str]) -> None:
    """Raise `SettingsError` if a parser has left something of a command line.

    Args:
        rest: what it has left.
        known: the names of all options that there are.
    """
    if rest and rest[0].startswith("-"):
        option = rest[0].partition("=")[0]
        raise SettingsError(f"there is no option {option!r}{_question(option.strip('-'), known, '--')}")
    if rest:
        raise SettingsError(
            f"{rest[0]!r} is neither an option nor the value of one: write --name value, and a recipe or a run before "
            "all options."
        )


def _question(name: str, known: Sequence[str], prefix: str) -> str:
    """Whether one of `known` was meant: one that begins with `name`, or one that is spelt much like it."""
    name = name.replace("-", "_")
    longer = sorted((one for one in known if name and one.startswith(name)), key=len)
    likely = next(iter([*longer, *difflib.get_close_matches(name, known, 1)]), None)
    return "." if likely is None else f"; is it {prefix + likely!r}?"
