"""What is written about the settings: rows for a table, and the parameters of `A3POConfig`'s docstring.

Guarantees: everything comes from the fields, so that a setting is described once.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trl_a3po.config.settings import settings_by_group


@dataclass(frozen=True)
class SettingRow:
    """A setting for a reader.

    Args:
        group: heading of its group.
        name: name of the field.
        type: its type, without ranges.
        default: its default.
        help: what it does.
    """

    group: str
    name: str
    type: str
    default: Any
    help: str


def setting_rows() -> Iterator[SettingRow]:
    """Every setting that `A3POConfig` adds to `GRPOConfig`, group by group."""
    for group, cls, setting in settings_by_group():
        words = type_words(get_type_hints(cls)[setting.name])
        yield SettingRow(group, setting.name, words, setting.default, setting.metadata["help"])


def type_words(hint: Any) -> str:
    """A type as a docstring names it: `str` for a choice of strings; `None` as an alternative is left out."""
    if get_origin(hint) is Literal:
        return "str"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_words(member) for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is list:
        return f"list[{type_words(get_args(hint)[0])}]"
    return str(hint.__name__)


def parameters_section() -> str:
    """The settings as the "Parameters" of a docstring."""
    lines = ["Parameters:"]
    group = ""
    for row in setting_rows():
        if row.group != group:
            group = row.group
            lines += [
                f"    > Parameters that control {group[0].lower() + group[1:] if group != 'vLLM' else group}",
                "",
            ]
        default = "" if row.default is None else f", defaults to `{row.default!r}`"
        lines.append(f"    {row.name} (`{row.type}`, *optional*{default}):")
        lines += [f"        {line}" for line in textwrap.wrap(row.help, 108)]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
