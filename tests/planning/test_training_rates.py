"""The times of training that finished runs tell apart: takes are made from known rates, which are found again."""

import pytest

from trl_a3po.planning.training_rates import TrainedTake, TrainingRates, training_rates

TOKEN, MICRO_STEP, OPTIMIZER_STEP = 0.001, 0.05, 0.3


def take(tokens, micro_steps, optimizer_steps=1, besides=0.0):
    seconds = TOKEN * tokens + MICRO_STEP * micro_steps + OPTIMIZER_STEP * optimizer_steps + besides
    return TrainedTake(tokens, micro_steps, optimizer_steps, seconds)


def takes(micro_steps, tokens=(500, 620, 700, 560, 480)):
    return [take(count, micro_steps) for count in tokens]


def close(rates, token, micro_step, optimizer_step, told_apart):
    expected = pytest.approx((token, micro_step, optimizer_step))
    return (rates.token, rates.micro_step, rates.optimizer_step) == expected and rates.told_apart == told_apart


def test_one_run_tells_the_tokens_from_the_rest_and_not_the_rest_apart():
    assert close(training_rates([takes(4)]), TOKEN, MICRO_STEP + OPTIMIZER_STEP / 4, 0.0, False)


def test_two_runs_with_other_micro_batches_tell_all_three_apart():
    assert close(training_rates([takes(1), takes(8)]), TOKEN, MICRO_STEP, OPTIMIZER_STEP, True)


def test_a_run_whose_takes_share_an_optimizer_step_tells_all_three_apart():
    periodic = [take(60 + 7 * number % 40, 1, int(number % 4 == 3)) for number in range(16)]
    assert close(training_rates([periodic]), TOKEN, MICRO_STEP, OPTIMIZER_STEP, True)


def test_equal_lengths_on_one_and_on_two_trainers_tell_what_is_shared_out_from_what_is_not():
    one, two = takes(12, [600] * 5), takes(6, [300] * 5)
    assert close(training_rates([one, two]), TOKEN + 12 * MICRO_STEP / 600, 0.0, OPTIMIZER_STEP, False)


def test_equal_lengths_in_one_run_belong_to_the_tokens():
    assert close(training_rates([takes(2, [600] * 5)]), TOKEN + (2 * MICRO_STEP + OPTIMIZER_STEP) / 600, 0, 0, False)


def test_one_slow_take_does_not_decide_the_time_of_a_token():
    runs = [[*takes(1), take(720, 1, besides=2.0)], takes(8)]
    assert training_rates(runs).token == pytest.approx(TOKEN)


@pytest.mark.parametrize("seconds", [(1.0, 0.1), (0.1, 1.0), (1.0, 1.0)])
def test_no_rate_is_negative(seconds):
    """Two runs of which one is faster than any rates allow."""
    runs = [[TrainedTake(600, count, 1, each)] * 3 for count, each in zip((1, 8), seconds, strict=True)]
    rates: TrainingRates = training_rates(runs)
    assert rates.token > 0 and min(rates.micro_step, rates.optimizer_step) >= 0
