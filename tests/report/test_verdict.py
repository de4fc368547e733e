"""The verdict says what limits a run: on lines of a timeline that are written by hand, and on runs that are limited by
construction."""

from dataclasses import fields, replace

import pytest

from recipes import limits
from tests.report.made_lines import FIRST, LINES, batch, group, span, start
from trl_a3po import A3POConfig
from trl_a3po.report.run_numbers import RunNumbers, run_numbers
from trl_a3po.report.timeline import read_timeline
from trl_a3po.report.verdict import verdict, verdict_of

CALM = RunNumbers(
    seconds=100.0,
    training=0.95,
    waiting=0.0,
    publishing=0.05,
    waiting_for_sampling=0.0,
    waiting_for_rewards=0.0,
    waiting_for_stragglers=0.0,
    slowest_phase="sampling",
    engine_busy=0.9,
    rewards_busy=0.1,
    engine_fill=0.8,
    groups_per_batch=4,
    num_generations=8,
    max_staleness=4,
    engine_slots=32,
)
WAITING = {"waiting": 0.6, "training": 0.35, "waiting_for_sampling": 0.55, "waiting_for_rewards": 0.05}


@pytest.mark.parametrize(
    ("changes", "limit", "setting"),
    [
        ({}, "balanced", None),
        ({"engine_busy": 0.3, "rewards_busy": 0.9}, "balanced", None),
        ({"engine_busy": 0.3}, "training", "per_device_train_batch_size"),
        ({"waiting": 0.15, "training": 0.8}, "balanced", None),
        ({"waiting": 0.15, "training": 0.8, "engine_busy": 0.5}, "training", "per_device_train_batch_size"),
        ({"publishing": 0.4}, "publishing", "weight_sync_steps"),
        (WAITING, "generation", "engine_device"),
        ({**WAITING, "engine": "vllm", "engine_slots": None, "engine_fill": None}, "generation", "vllm_server_urls"),
        ({**WAITING, "publishing": 0.4}, "generation", "engine_device"),
        ({**WAITING, "engine_busy": 0.5}, "max_staleness", "max_staleness"),
        ({**WAITING, "engine_busy": 0.5, "schedule": "sync"}, "max_staleness", "schedule"),
        ({**WAITING, "engine_busy": 0.5, "schedule": "periodic"}, "max_staleness", "schedule"),
        ({**WAITING, "engine_fill": 0.1}, "tiny queue", "max_staleness"),
        ({**WAITING, "engine_fill": 0.1, "engine_busy": 0.5, "max_staleness": 0}, "max_staleness", "max_staleness"),
        ({**WAITING, "waiting_for_stragglers": 0.5}, "straggler", "max_staleness"),
        ({**WAITING, "waiting_for_stragglers": 0.5, "slowest_phase": "scoring"}, "straggler", "reward_timeout"),
        ({**WAITING, "waiting_for_rewards": 0.5, "rewards_busy": 1.0}, "rewards", "reward_workers"),
        ({**WAITING, "waiting_for_rewards": 0.5, "rewards_busy": 0.5}, "rewards", "reward_workers"),
        ({**WAITING, "waiting_for_rewards": 0.5, "engine_busy": 0.4}, "max_staleness", "max_staleness"),
    ],
)  # fmt: skip
def test_the_limit_follows_from_the_numbers(changes, limit, setting):
    found = verdict(replace(CALM, **changes))
    assert (found.limit, found.setting) == (limit, setting)
    assert setting is None or setting in found.sentence
    assert setting is None or setting in {field.name for field in fields(A3POConfig)}


def test_a_balanced_run_names_the_part_that_keeps_up_least():
    assert "the engine had work 90% of the time" in verdict(CALM).sentence
    assert "rewards were computed 95% of the time" in verdict(replace(CALM, rewards_busy=0.95)).sentence


# --- the numbers, from lines ----------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_lines():
    unused = group(48.0, None, None, None, 50.0, "unused")
    numbers = run_numbers([start(engine_slots=8, settings={"reward_workers": 2}), *LINES, unused])
    assert numbers.seconds == 20.0  # not the first take, which found an empty queue, nor the evaluations
    shares = (numbers.training, numbers.waiting, numbers.publishing)
    assert shares == pytest.approx((0.5, 0.4, 0.1))
    assert numbers.waiting_for_sampling == pytest.approx(0.2)
    assert numbers.waiting_for_rewards == pytest.approx(0.2)
    assert numbers.waiting_for_stragglers == 0.0
    assert numbers.engine_busy == pytest.approx((9 + 3 + 3 + 3) / 40)  # until the last group was submitted
    assert numbers.rewards_busy == pytest.approx(3 / 40 / 2)
    assert numbers.engine_fill == pytest.approx(2 / 4 * 4 / 8)  # one group of 4 in two of four seconds


def batches_that_end(*ends):
    """Three batches whose groups, sampled from a second before the take on, become ready at these seconds of it."""
    lines = [start(), span("take", 0.0, 1.0), span("step", 0.0, 10.0)]
    for at in (10.0, 20.0, 30.0):
        lines += [
            span("take", at, at + 6),
            *(group(at - 1, at + end, at + end, at + end, at + 6) for end in ends),
            span("step", at, at + 10),
        ]
    return lines


def test_the_wait_for_a_straggler_begins_when_the_rest_of_the_batch_is_ready():
    numbers = run_numbers(batches_that_end(0.5, 1.0, 1.0, 5.9))
    assert numbers.waiting == pytest.approx(0.6)
    assert numbers.waiting_for_stragglers == pytest.approx(0.49)
    assert numbers.slowest_phase == "sampling"
    assert verdict(numbers).limit == "straggler"


def test_a_group_that_takes_twice_as_long_as_others_is_no_straggler():
    numbers = run_numbers(batches_that_end(1.0, 2.0, 2.0, 5.9))
    assert numbers.waiting == pytest.approx(0.6) and numbers.waiting_for_stragglers == 0.0


def test_the_last_quarter_of_a_batch_straggles_together():
    """Two of eight groups end late: the trainer waits for both of them."""
    numbers = run_numbers(batches_that_end(*[1.0] * 6, 5.5, 5.9))
    assert numbers.waiting_for_stragglers == pytest.approx(0.49)


def test_a_publish_before_the_first_step_that_counts_and_after_the_last_one_does_not_count():
    publishes = [span("publish", 12.0, 15.0), span("publish", 55.0, 58.0)]
    numbers = run_numbers([start(), *LINES, *publishes])
    assert numbers == run_numbers([start(), *LINES])


def test_groups_that_are_in_the_engine_at_once_keep_it_busy_once():
    assert run_numbers(batches_that_end(1.0, 1.0, 1.0, 1.0)).engine_busy == pytest.approx(4 / 20)


def test_a_reward_counts_as_waited_for_from_the_beginning_of_the_take():
    lines = [start(), span("take", 0.0, 1.0), span("step", 0.0, 10.0)]
    for at in (10.0, 20.0, 30.0):
        lines += [span("take", at, at + 2), group(at - 5, at - 3, at - 3, at + 2, at + 2), span("step", at, at + 10)]
    numbers = run_numbers(lines)
    assert (numbers.waiting_for_sampling, numbers.waiting_for_rewards) == pytest.approx((0.0, 0.2))


def test_a_run_that_has_not_trained_two_batches_has_no_verdict():
    assert verdict_of([]) is None
    assert verdict_of([start()]) is None
    assert verdict_of([start(), *FIRST, *batch(20.0)]) is None
    assert verdict_of([start(), *LINES]) is not None


def test_a_resumed_run_has_the_numbers_of_its_last_process():
    resumed = start(resumed=True)
    assert run_numbers([start(), *LINES, resumed, *LINES]) == run_numbers([start(), *LINES])
    assert run_numbers([start(), *LINES, resumed]) is None


def test_the_last_takes_alone_can_be_judged():
    waits = [
        line
        for at in (60.0, 70.0)
        for line in (
            span("take", at, at + 9.0),
            group(at, at + 9.0, at + 9.0, at + 9.0, at + 9.0),
            span("step", at, at + 10.0),
        )
    ]
    numbers = run_numbers([start(), *LINES, *waits], last_takes=2)
    assert (numbers.seconds, numbers.waiting) == pytest.approx((20.0, 0.9))


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", limits.RUNS)
def test_a_run_that_is_limited_by_construction_is_recognised(tmp_path, name):
    limits.make_run(name, tmp_path)
    lines = read_timeline(tmp_path)
    assert verdict_of(lines).limit == limits.LIMITS[name], run_numbers(lines)
