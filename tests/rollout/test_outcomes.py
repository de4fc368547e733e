import pytest

from trl_a3po.rollout.outcomes import Ledger


def test_a_retried_prompt_has_one_outcome_and_each_attempt_its_own():
    ledger = Ledger()
    ledger.prompt_popped(0)
    ledger.attempt_submitted(10)
    ledger.end_attempt(10, "failed", "lost")
    ledger.attempt_submitted(11)
    ledger.end_attempt(11, "trained")
    ledger.end_prompt(0, "trained")
    outcomes = ledger.snapshot()
    assert outcomes.prompt_outcomes == {"trained": 1}
    assert outcomes.attempt_outcomes == {"failed: lost": 1, "trained": 1}


def test_what_has_not_ended_is_counted_as_open():
    ledger = Ledger()
    ledger.prompt_popped(0)
    ledger.attempt_submitted(10)
    outcomes = ledger.snapshot()
    assert (outcomes.open_prompts, outcomes.open_attempts) == (1, 1)


def test_counting_a_kind_ignores_the_reason():
    ledger = Ledger()
    for index, why in enumerate(["too easy", "too hard"]):
        ledger.prompt_popped(index)
        ledger.end_prompt(index, "rejected", why)
    assert ledger.snapshot().count("rejected") == 2


@pytest.mark.parametrize("book", ["end_attempt", "end_prompt"])
def test_recording_an_outcome_twice_raises(book):
    ledger = Ledger()
    ledger.prompt_popped(0)
    ledger.attempt_submitted(0)
    getattr(ledger, book)(0, "unused")
    with pytest.raises(ValueError, match="recorded twice"):
        getattr(ledger, book)(0, "trained")
