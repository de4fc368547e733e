"""SlotDecoder and the later turns of rollouts that have begun: the same tokens as without a break."""

from dataclasses import replace

import pytest

from tests.engines.transformers.tiny_models import prompts, request, run, settings, tiny_model
from trl_a3po.engines.transformers.decoder import SlotDecoder


def later_turn(first, rollout, number: int, tokens: int, length: int, **changes):
    """The request for the rest of a rollout of `first`, of whose completion `tokens` are known."""
    prompt_ids = (*first.prompt_ids, *rollout.token_ids[:tokens])
    request_id = changes.pop("request_id", 1)
    return replace(
        first, request_id=request_id, prompt_ids=prompt_ids, num_rollouts=1, first_rollout=number,
        first_position=tokens, max_new_tokens=length - tokens, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_rollout_taken_up_again_goes_on_as_without_a_break(deterministic):
    model, text = tiny_model(), prompts(1)[0]
    options = {"slots": 4, "deterministic": True, "max_prompt_tokens": len(text)} if deterministic else {"slots": 4}
    whole = request(0, text, 3)
    rollouts = run(SlotDecoder(model, settings(20), **options), [whole])[0]
    for number, rollout in enumerate(rollouts):
        length = len(rollout.token_ids)
        rest = later_turn(whole, rollout, number, length // 2, length)
        (again,) = run(SlotDecoder(model, settings(20), **options), [rest])[1]
        assert again.token_ids == rollout.token_ids[length // 2 :]
        assert again.logps == pytest.approx(rollout.logps[length // 2 :], abs=1e-5)
        assert again.finish_reason == rollout.finish_reason


def test_a_turn_ends_at_its_own_stop_tokens_and_its_own_length():
    model, text = tiny_model(), prompts(1)[0]
    (rollout,) = run(SlotDecoder(model, settings(12), slots=2), [request(0, text)])[0]
    stop = rollout.token_ids[4]
    at = rollout.token_ids.index(stop)
    decoder = SlotDecoder(model, settings(12), slots=2)
    ended = run(
        decoder,
        [
            replace(request(0, text), stop_token_ids=(stop,)),
            replace(request(1, text, noise_key=0), max_new_tokens=3),
        ],
    )
    assert (ended[0][0].token_ids, ended[0][0].finish_reason) == (rollout.token_ids[: at + 1], "stop")
    assert (ended[1][0].token_ids, ended[1][0].finish_reason) == (rollout.token_ids[:3], "length")


def test_later_turns_go_before_prompts_that_have_not_begun():
    decoder = SlotDecoder(tiny_model(), settings(4), slots=1)
    for number, text in enumerate(prompts(3)):
        decoder.submit(request(number, text))
    decoder.submit(replace(request(10, prompts(1)[0]), first_position=2, max_new_tokens=2))
    decoder.submit(replace(request(11, prompts(1)[0]), first_position=2, max_new_tokens=2))
    ended = []
    while not decoder.idle:
        ended += [event.request_id for event in decoder.step()]
    assert ended == [10, 11, 0, 1, 2]


def test_more_tokens_than_the_run_allows_are_refused():
    with pytest.raises(ValueError, match="asks for max_new_tokens=9: it must be between 1 and the run's"):
        SlotDecoder(tiny_model(), settings(8), slots=1).submit(replace(request(0, [5]), max_new_tokens=9))
