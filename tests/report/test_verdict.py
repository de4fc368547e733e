"""The verdict says what limits a run: on lines of a timeline that are written by hand, and on runs that are limited by
construction."""

from dataclasses import fields, replace

import numpy as np
import pytest

from recipes import limits
from tests.report.made_lines import FIRST, LINES, batch, group, span, start
from trl_a3po import A3POConfig
from trl_a3po.report.run_numbers import RunNumbers, run_numbers
from trl_a3po.report.run_settings import RunSettings
from trl_a3po.report.sampling_times import share_of_length
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
    settings=RunSettings(groups_per_batch=4, num_generations=8, max_staleness=4, engine_slots=32, accelerators=2),
)
NAMES = {field.name for field in fields(A3POConfig)}
OF_THE_RUN = {field.name for field in fields(RunSettings)}


def changed(**changes):
    """`CALM` with other numbers and settings."""
    run = {name: changes.pop(name) for name in OF_THE_RUN & changes.keys()}
    return replace(CALM, settings=replace(CALM.settings, **run), **changes)


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
    found = verdict(changed(**changes))
    assert (found.limit, found.setting) == (limit, setting)
    assert setting is None or setting in found.sentence
    assert setting is None or setting in {field.name for field in fields(A3POConfig)}


def test_a_balanced_run_names_the_part_that_keeps_up_least():
    assert "the engine had work 90% of the time" in verdict(CALM).sentence
    assert "rewards were computed 95% of the time" in verdict(changed(rewards_busy=0.95)).sentence


# --- what a run leaves no room for is not advised -------------------------------------------------------------------

TRAINING = {"engine_busy": 0.3}
STARVED = {**WAITING, "waiting_for_stragglers": 0.5}
PUBLISHES = {"publishing": 0.4}
ONE_GPU, CPU = {"accelerators": 1}, {"accelerators": 0}
CUSTOM = {"engine": "Mine"}


@pytest.mark.parametrize(
    ("changes", "advised", "not_advised"),
    [
        (WAITING, ["engine_device", "engine='vllm'", "max_completion_length"], []),
        ({**WAITING, **ONE_GPU}, ["engine='vllm'", "max_completion_length"], ["engine_device"]),
        ({**WAITING, **CPU}, ["max_completion_length"], ["engine_device", "vllm"]),
        ({**WAITING, "engine_devices": 1}, ["more devices (engine_device)"], ["its own"]),
        ({**WAITING, "engine_devices": 2}, ["engine='vllm'"], ["engine_device"]),
        ({**WAITING, **CUSTOM, "share_of_length": 0.5}, ["max_completion_length"], ["engine_device", "vllm"]),
        ({**WAITING, **CUSTOM}, ["max_completion_length"], []),
        ({**WAITING, **CUSTOM, "share_of_length": 0.1}, ["engine itself faster"], ["max_completion_length"]),
        ({**WAITING, **CPU, "share_of_length": 0.1}, ["max_completion_length"], []),  # decodes token after token
        (TRAINING, ["per_device_train_batch_size"], ["gradient_checkpointing", "proximal_method", "engines"]),
        ({**TRAINING, "gradient_accumulation_steps": 2}, ["per_device_train_batch_size"], []),
        ({**TRAINING, "gradient_accumulation_steps": 1}, ["smaller model"], ["per_device_train_batch_size"]),
        ({**TRAINING, "gradient_checkpointing": True}, ["gradient_checkpointing=False"], []),
        ({**TRAINING, "proximal_method": "recompute"}, ["proximal_method='loglinear'"], []),
        ({**TRAINING, "engines": 3}, ["Fewer than 3 engines"], []),
        ({**STARVED, "stragglers_are_long": True}, ["max_staleness", "max_completion_length"], ["does not explain"]),
        ({**STARVED, "stragglers_are_long": False}, ["length does not explain"], ["max_completion_length"]),
        ({**STARVED, "schedule": "sync"}, ["schedule='async'"], ["Raise max_staleness"]),
        ({**WAITING, "engine_fill": 0.1}, ["Raise max_staleness"], ["generation_batch_size"]),
        (PUBLISHES, ["weight_sync_steps"], ["lora_sync"]),
        ({**PUBLISHES, "lora_sync": "adapter"}, ["weight_sync_steps"], ["lora_sync"]),
        ({**PUBLISHES, "lora_sync": "merged"}, ["weight_sync_steps", "lora_sync='adapter'"], []),
        ({**PUBLISHES, "max_staleness": 0}, ["max_staleness=0 does not let"], ["weight_sync_steps"]),
        ({**PUBLISHES, "max_staleness": 0, "steps_per_batch": 2}, ["weight_sync_steps"], []),
        ({**PUBLISHES, "max_staleness": 3, "weight_sync_steps": 4}, ["does not let"], ["weight_sync_steps"]),
        ({**PUBLISHES, "schedule": "fixed_lag"}, ["fixed_lag' publishes at every batch"], ["weight_sync_steps"]),
    ],
)  # fmt: skip
def test_only_what_the_run_leaves_room_for_is_advised(changes, advised, not_advised):
    found = verdict(changed(**changes))
    assert all(words in found.sentence for words in advised), found.sentence
    assert not any(words in found.sentence for words in not_advised), found.sentence
    assert (found.setting is None) == ("No setting of this run is left to try" in found.sentence)


@pytest.mark.parametrize("changes", [WAITING, TRAINING, STARVED, PUBLISHES, {**WAITING, "engine_busy": 0.5}])
def test_every_piece_of_advice_says_what_it_costs(changes):
    sentence = verdict(changed(**changes, gradient_checkpointing=True, lora_sync="merged")).sentence
    costs = ("do not train", "cuts off", "holds more", "older", "need more memory", "needs memory", "applies")
    advice = [part for part in sentence.split(". ")[1:] if any(name in part for name in NAMES)]
    assert advice and all(any(cost in part for cost in costs) for part in advice), advice


def test_the_publish_rule_is_the_one_that_refuses_settings():
    """A setting is advised if and only if a larger one would be accepted."""
    for bound in range(4):
        for steps in range(1, 5):
            run = replace(CALM.settings, max_staleness=bound, weight_sync_steps=steps)
            accepted = [is_accepted(bound, larger) for larger in range(steps + 1, 20)]
            advised = verdict(replace(CALM, publishing=0.4, settings=run)).setting == "weight_sync_steps"
            assert advised == any(accepted), (bound, steps)


def is_accepted(max_staleness, weight_sync_steps):
    try:
        A3POConfig("", report_to="none", max_staleness=max_staleness, weight_sync_steps=weight_sync_steps)
    except ValueError:
        return False
    return True


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


@pytest.mark.parametrize(("longest", "long"), [(10, False), (50, True)])
def test_a_straggler_is_long_if_a_token_of_it_takes_about_as_long_as_others(longest, long):
    lines = batches_that_end(0.5, 1.0, 1.0, 5.9)  # three and a half times the usual time
    for line in lines:
        if line["kind"] == "group":
            line["lengths"] = [5, longest if line["finished"] - line["submitted"] > 6 else 15]
    assert run_numbers(lines).stragglers_are_long is long
    assert ("max_completion_length" in verdict_of(lines).sentence) == long


def sampled(times, lengths, *, one_after_another=False):
    began, lines = 0.0, []
    for time, length in zip(times, lengths, strict=True):
        submitted = 0.0 if one_after_another else began
        lines.append({**group(submitted, began + time, 0.0, 0.0, 0.0), "lengths": [1, length]})
        began += time
    return lines


@pytest.mark.parametrize("one_after_another", [False, True])
def test_the_share_of_sampling_that_goes_with_length_is_found_in_spite_of_stragglers(one_after_another):
    lengths = np.random.default_rng(0).integers(1, 100, 60)
    slow = np.where(np.arange(60) % 7 == 3, 9.0, 0.0)
    for per_token, share in ((0.0, 0.0), (1 / 50, 0.5), (1e3, 1.0)):
        times = 1.0 + per_token * lengths + slow
        found = share_of_length(sampled(times, lengths, one_after_another=one_after_another))
        expected = per_token * (lengths.mean() + one_after_another) / times.mean()
        assert found == pytest.approx(expected, abs=0.1)
        assert found == pytest.approx(share, abs=0.25)


def test_few_groups_or_equal_lengths_say_nothing_about_length():
    assert share_of_length(sampled([1.0] * 5, range(1, 6))) is None
    assert share_of_length(sampled(np.arange(1.0, 31.0), [7] * 30)) is None
    assert share_of_length([group(1.0, 2.0, 2.0, 2.0, 2.0)] * 30) is None


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
    found = verdict_of(lines)
    assert found.limit == limits.LIMITS[name], run_numbers(lines)
    moot = ("(max_completion_length)", "engine_device", "per_device_train_batch_size",
            "generation_batch_size")  # fmt: skip
    assert not any(words in found.sentence for words in moot), found.sentence
