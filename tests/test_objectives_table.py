"""The tables about objectives in the documentation are what `A3POConfig` enforces: every combination is built."""

import itertools

import pytest

from trl_a3po import A3POConfig
from trl_a3po.objectives.documentation import SCHEDULES, kl_table, loss_types_table, schedules_table
from trl_a3po.objectives.table import OBJECTIVES

EXTRA = {
    "asympo": {"scale_rewards": "none"},
    "spo": {"scale_rewards": "none"},
    "masked_is": {"proximal_method": "reuse"},
}
KL = {"none": {"beta": 0.0}, "plain": {"beta": 0.1}, "corrected": {"beta": 0.1, "use_bias_correction_kl": True}}


def cells(table: list[list[str]], labels: int) -> dict[tuple[str, ...], dict[str, str]]:
    """A table as `{row labels: {column: cell}}`."""
    header, *rows = table
    return {tuple(row[:labels]): dict(zip(header[labels:], row[labels:], strict=True)) for row in rows}


LOSS = cells(loss_types_table(), 2)
KL_TERM = cells(kl_table(), 1)
SCHEDULE = cells(schedules_table(), 1)


def config(objective, level, loss, kl, schedule, **changes) -> A3POConfig:
    return A3POConfig(
        output_dir="unused",
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=8,
        objective=objective,
        importance_sampling_level=level,
        loss_type=loss,
        schedule=schedule,
        **{**KL[kl], **EXTRA.get(objective, {}), **changes},
    )


def holds(cell: str, schedule: str) -> bool:
    return cell == "works" or schedule in cell.split(", ")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_combination_is_refused_exactly_where_a_table_says_so(objective):
    wrong = []
    losses = LOSS[objective, "token"]
    for level, loss, kl, schedule in itertools.product(("token", "sequence"), losses, KL, SCHEDULES):
        claims = [LOSS[objective, level][loss], KL_TERM[objective,][kl], SCHEDULE[objective,][schedule]]
        claims.append("refused" if (loss, schedule) == ("bnpo", "periodic") else "works")
        try:
            config(objective, level, loss, kl, schedule)
            works = True
        except ValueError:
            works = False
        if works != all(holds(cell, schedule) for cell in claims):
            wrong.append((level, loss, kl, schedule, works))
    assert not wrong


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_delta_is_refused_with_every_objective(objective):
    with pytest.raises(ValueError, match=r"delta=4\.0"):
        config(objective, "token", "grpo", "none", "async", delta=4.0)


@pytest.mark.parametrize("changes", [{"proximal_method": "behavior"}, {"max_staleness": 1}])
def test_a_corrected_kl_term_is_allowed_where_the_ratio_is_that_of_the_behavior_policy(changes):
    config("decoupled", "token", "grpo", "corrected", "async", **changes)
