"""How the commands read their options: by whole names, and with one sentence about what they do not know.

Guarantees: no abbreviation stands for an option, so a typing error never sets another one; what is no option is named
with the option that is most like it; whatever argparse refuses is a `SettingsError` of one sentence.
"""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class SettingsError(ValueError):
    """A recipe or a command line holds a name that is not a setting, or settings that cannot hold."""


class OptionParser(argparse.ArgumentParser):
    """Takes options by their whole names, and raises `SettingsError` where argparse prints its usage."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs | {"allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        # "argument --a_b/--a-b: expected one argument" names the option twice.
        raise SettingsError(re.sub(r"^argument (-[^/:\s]+)[^:\s]*: ", r"\1: ", message))

    @property
    def names(self) -> list[str]:
        """The names of the options, as a recipe writes them."""
        return [action.dest for action in self._actions if action.option_strings and action.dest != "help"]


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
