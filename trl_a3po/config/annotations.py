"""What the annotations of the settings say of their values: types, choices, ranges."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from trl_a3po.config.settings import settings_by_group
from trl_a3po.protocol.ranges import Range


@dataclass(frozen=True)
class Annotation:
    """The values that a setting can have.

    Args:
        name: the setting.
        type: the type of its values; `str` for choices.
        optional: whether `None` is a value.
        choices: the only values, where they are listed.
        range: the range of a number, where there is one.
    """

    name: str
    type: object
    optional: bool = False
    choices: tuple[str, ...] = ()
    range: Range | None = None


def annotations() -> Iterator[Annotation]:
    """The annotation of every setting that `A3POConfig` adds to `GRPOConfig`, group by group."""
    for _, cls, setting in settings_by_group():
        yield _annotation(setting.name, get_type_hints(cls, include_extras=True)[setting.name])


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; a type that is none is alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _annotation(name: str, hint: Any) -> Annotation:
    kinds = members(hint)
    optional = NoneType in kinds
    (kind,) = (member for member in kinds if member is not NoneType)
    if get_origin(kind) is Literal:
        return Annotation(name, str, optional, choices=get_args(kind))
    if get_origin(kind) is Annotated:
        number, range_ = get_args(kind)
        return Annotation(name, number, optional, range=range_)
    return Annotation(name, kind, optional)
