"""The tables about objectives in the documentation, from their records: the header first, then a row per objective."""

from trl_a3po.objectives.table import OBJECTIVES, SETTINGS_OF, ObjectiveSettings

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")
SCHEDULES = ("async", "sync", "fixed_lag", "periodic")

Table = list[list[str]]


def objectives_table() -> Table:
    """What each objective is, with its settings and its source."""
    table = [["objective", "what it is", "minimised for a token", "its settings", "source"]]
    for name, objective in OBJECTIVES.items():
        settings = ", ".join(f"`{setting}`" for setting in sorted(SETTINGS_OF[name]))
        table.append([f"`{name}`", objective.summary, objective.formula, settings, objective.paper])
    return table


def loss_types_table() -> Table:
    """With which of TRL's loss types, at which level of the ratio, each objective can be trained."""
    table = [["objective", "level", *LOSS_TYPES]]
    for name, objective in OBJECTIVES.items():
        for level in LEVELS:
            allowed = objective.allows("importance_sampling_level", level)
            works = [allowed and objective.allows("loss_type", loss_type) for loss_type in LOSS_TYPES]
            table.append([name, level, *map(_word, works)])
    return table


def schedules_table() -> Table:
    """With which schedule each objective can be trained."""
    table = [["objective", *SCHEDULES]]
    for name, objective in OBJECTIVES.items():
        table.append([name, *(_word(objective.allows("schedule", schedule)) for schedule in SCHEDULES)])
    return table


def kl_table() -> Table:
    """Whether each objective can be trained without a KL term, with one, and with one corrected by the ratio."""
    table = [["objective", "none", "plain", "corrected"]]
    for name, objective in OBJECTIVES.items():
        corrected = objective.ratio_is_behavior_ratio(ObjectiveSettings(), 0)
        table.append([name, "works", "works", "sync, periodic" if corrected else "refused"])
    return table


def _word(works: bool) -> str:
    return "works" if works else "refused"
