"""The tables of docs/objectives.md are what `A3POConfig` enforces: every combination is built."""

import itertools
from pathlib import Path

import pytest

from trl_a3po import A3POConfig
from trl_a3po.config.a3po_config import CHOICES
from trl_a3po.config.check_objective import check_objective

DOCUMENT = Path(__file__).parents[1] / "docs" / "objectives.md"
EXTRA = {
    "asympo": {"scale_rewards": "none"},
    "spo": {"scale_rewards": "none"},
    "masked_is": {"proximal_method": "reuse"},
}
KL = {"none": {"beta": 0.0}, "plain": {"beta": 0.1}, "corrected": {"beta": 0.1, "use_bias_correction_kl": True}}


def tables() -> list[dict[tuple[str, ...], dict[str, str]]]:
    """Each table of the document as `{row labels: {column: cell}}`."""
    blocks = itertools.groupby(DOCUMENT.read_text(encoding="utf-8").splitlines(), lambda line: line.startswith("|"))
    found = []
    for _, block in (pair for pair in blocks if pair[0]):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block]
        labels = 2 if header[1] == "level" else 1
        found.append({tuple(row[:labels]): dict(zip(header[labels:], row[labels:], strict=True)) for row in rows})
    return found


LOSS, KL_TERM, SCHEDULE = tables()
OBJECTIVES = [objective for (objective,) in KL_TERM]


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


def test_the_tables_name_every_objective_and_schedule():
    assert set(OBJECTIVES) == set(CHOICES["objective"]) == {objective for objective, _ in LOSS}
    assert all(set(row) == set(CHOICES["schedule"]) for row in SCHEDULE.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_combination_is_refused_exactly_where_a_table_says_so(objective):
    wrong = []
    losses = LOSS[objective, "token"]
    for level, loss, kl, schedule in itertools.product(("token", "sequence"), losses, KL, CHOICES["schedule"]):
        cells = [LOSS[objective, level][loss], KL_TERM[objective,][kl], SCHEDULE[objective,][schedule]]
        cells.append(SCHEDULE.get((loss,), {}).get(schedule, "works"))
        try:
            config(objective, level, loss, kl, schedule)
            works = True
        except ValueError:
            works = False
        if works != all(holds(cell, schedule) for cell in cells):
            wrong.append((level, loss, kl, schedule, works))
    assert not wrong


def test_an_objective_without_rules_is_not_held_to_those_of_another():
    args = config("decoupled", "token", "grpo", "none", "async")
    args.objective = "mine"
    with pytest.raises(NotImplementedError, match="objective='mine' has no rules yet"):
        check_objective(args)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_delta_is_refused_with_every_objective(objective):
    with pytest.raises(ValueError, match=r"delta=4\.0"):
        config(objective, "token", "grpo", "none", "async", delta=4.0)


@pytest.mark.parametrize("changes", [{"proximal_method": "behavior"}, {"max_staleness": 1}])
def test_a_corrected_kl_term_is_allowed_where_the_ratio_is_that_of_the_behavior_policy(changes):
    config("decoupled", "token", "grpo", "corrected", "async", **changes)
