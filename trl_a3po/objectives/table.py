"""The objectives that `A3POConfig.objective` can name: one row each, the class of its settings.

A row is all that this package needs besides the objective's own file: the fields of its settings become settings of
`A3POConfig`, and its record says everything else.
"""

from dataclasses import dataclass, fields

from trl_a3po.objectives.aipo import AIPOSettings
from trl_a3po.objectives.asympo import AsympoSettings
from trl_a3po.objectives.decoupled import DecoupledSettings
from trl_a3po.objectives.m2po import M2POSettings
from trl_a3po.objectives.masked_is import MaskedISSettings
from trl_a3po.objectives.objective import Objective, SettingsOfObjective
from trl_a3po.objectives.spo import SPOSettings


@dataclass
class ObjectiveSettings(
    DecoupledSettings,
    AsympoSettings,
    SPOSettings,
    MaskedISSettings,
    AIPOSettings,
    M2POSettings,
):
    """The settings of every objective."""


_ROWS: tuple[type[SettingsOfObjective], ...] = ObjectiveSettings.__bases__

OBJECTIVES: dict[str, Objective] = {row._record.name: row._record for row in _ROWS}
"""Name -> record."""

SETTINGS_OF: dict[str, frozenset[str]] = {
    row._record.name: frozenset(setting.name for setting in fields(row)) for row in _ROWS
}
"""Name -> the fields of `ObjectiveSettings` that the objective uses."""
