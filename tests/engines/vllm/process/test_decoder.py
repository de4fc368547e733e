"""What the decoder asks of vLLM's core, on a core whose tokens are made up: which rollouts are decoded, and which
tokens they get."""

from dataclasses import replace

import pytest

from trl_a3po.engines.vllm.process.vllm_core import Output
from trl_a3po.engines.vllm.process.vllm_decoder import VLLMDecoder
from trl_a3po.protocol.engine import GroupFailed, GroupRequest, SamplingSettings

STOP = 1


class FakeCore:
    """Samples token 7 for every sequence in a step, but the first of each after `prefill` steps."""

    def __init__(self, prefill: int = 1):
        self.version = 0
        self.prefill = prefill
        self.added: list[tuple[str, list[int], dict, str]] = []
        self.features_of: list[tuple[tuple[int, ...], object]] = []
        self.log: list[str] = []  # with images: what was begun and aborted, and when images were forgotten
        self.sequences: dict[str, int] = {}
        self.recomputed = 0
        self.finish: dict[str, str] = {}

    @property
    def idle(self):
        return not self.sequences

    def features(self, token_ids, images):
        if images is None:
            return []
        self.features_of.append((token_ids, images))
        if images == "misplaced":
            raise ValueError("vLLM finds 0 of 1 images")
        return [f"features of {images}"]

    def add(self, key, token_ids, params, salt, features=()):
        self.log += [f"begin {key} with {feature}" for feature in features]
        assert key not in [added[0] for added in self.added]
        self.added.append((key, list(token_ids), params, salt))
        self.sequences[key] = -self.prefill

    def abort(self, keys):
        self.log += [f"abort {key}" for key in keys]
        for key in keys:
            del self.sequences[key]

    def recompute(self):
        self.recomputed += 1
        self.log.append("recompute")

    def forget_images(self):
        self.log.append("forget images")

    def step(self):
        outputs = []
        for key in list(self.sequences):
            self.sequences[key] += 1
            if self.sequences[key] <= 0:
                continue
            params = next(added[2] for added in self.added if added[0] == key)
            longest = 1 if params["score"] else params["sampling"].max_new_tokens
            finish = self.finish.get(key) or ("length" if self.sequences[key] == longest else None)
            prompt = [-float(n) for n in range(1, 6)] if params["score"] else None
            outputs.append(Output(key, [7], [-0.5], finish, self.version, prompt))
            if finish:
                del self.sequences[key]
        return outputs


def params(sampling, *, seed=None, score=False):
    return {"sampling": sampling, "seed": seed, "score": score}


def decoder_on(core, **changes) -> VLLMDecoder:
    settings = {
        "slots": 4,
        "context": 32,
        "max_prompt_tokens": 8,
        "vocab_size": 50,
        "recompute": False,
        "seeds": False,
    }
    return VLLMDecoder(core, SamplingSettings(4, seed=3), params, version=0, **{**settings, **changes})


def run(decoder, steps=100):
    return [event for _ in range(steps) for event in decoder.step()]


def test_no_more_rollouts_than_slots_are_in_vllm_and_the_rest_follows_in_order():
    core = FakeCore()
    decoder = decoder_on(core, slots=3)
    for number in range(3):
        decoder.submit(GroupRequest(number, number, (number + 5,), 2))
    decoder.step()
    assert len(core.sequences) == decoder.active_rollouts == 3 and decoder.waiting_requests == 1
    assert [event.request_id for event in run(decoder)] == [0, 1, 2]
    assert [ids for _, ids, _, _ in core.added] == [[5], [5], [6], [6], [7], [7]]
    assert decoder.idle and decoder.tokens == 24


def test_a_later_turn_goes_before_prompts_that_have_not_begun():
    core = FakeCore()
    decoder = decoder_on(core, slots=1)
    decoder.submit(GroupRequest(0, 0, (5,), 1))
    decoder.submit(GroupRequest(1, 1, (6,), 1))
    decoder.submit(GroupRequest(2, 2, (7, 7), 1, first_rollout=3, first_position=1, max_new_tokens=2))
    assert [event.request_id for event in run(decoder)] == [2, 0, 1]
    assert core.added[0][2]["sampling"].max_new_tokens == 2


def test_a_rollout_without_a_token_begins_anew_under_published_weights_and_others_go_on():
    core = FakeCore(prefill=2)
    decoder = decoder_on(core)
    decoder.submit(GroupRequest(0, 0, (5,), 1))
    run(decoder, 4)
    decoder.submit(GroupRequest(1, 1, (6,), 1))
    decoder.step()
    decoder.set_version(1)
    events = {event.request_id: event for event in run(decoder)}
    assert events[0].rollouts[0].versions == [0, 0, 0, 1] or events[0].rollouts[0].versions == [0, 0, 1, 1]
    assert events[1].rollouts[0].versions == [1, 1, 1, 1]
    assert [(ids, salt) for _, ids, _, salt in core.added] == [([5], "0"), ([6], "0"), ([6], "1")]


def test_a_publish_of_the_same_version_has_a_prefix_cache_of_its_own():
    core = FakeCore()
    decoder = decoder_on(core)
    for number in range(2):
        decoder.submit(GroupRequest(number, number, (5,), 1))
        run(decoder)
        decoder.set_version(0)
    assert len({salt for *_, salt in core.added}) == 2


@pytest.mark.parametrize("recompute", [False, True])
def test_an_episode_goes_on_with_its_own_cache_across_publishes_if_caches_are_kept(recompute):
    core = FakeCore(prefill=2)
    decoder = decoder_on(core, recompute=recompute)
    decoder.submit(GroupRequest(0, 0, (5,), 2, first_episode=7))
    decoder.step()
    decoder.set_version(1)  # before the first token: both begin anew
    run(decoder, 10)
    later = GroupRequest(1, 0, (5, 7, 7, 7, 7, 8), 1, first_rollout=1, first_position=5, first_episode=8)
    decoder.set_version(2)
    decoder.submit(later)
    decoder.step()
    decoder.set_version(3)
    run(decoder, 10)
    decoder.submit(GroupRequest(2, 2, (6,), 1, first_episode=9))
    decoder.end_episodes([8])
    decoder.submit(replace(later, request_id=3))
    run(decoder, 10)
    salts = ["0", "0", "1", "1", *(["2", "3"] if recompute else ["1", "1"]), "3", "3"]
    assert [salt for *_, salt in core.added] == salts


LATER_TURN = GroupRequest(1, 0, (5, 7, 7, 7, 7, 8), 1, first_position=5, first_episode=7)


def test_an_episode_whose_first_turn_saw_a_publish_goes_on_with_the_cache_in_which_that_turn_began():
    core = FakeCore()
    decoder = decoder_on(core)
    decoder.submit(GroupRequest(0, 0, (5,), 1, first_episode=7))
    run(decoder, 3)
    decoder.set_version(1)
    (event,) = run(decoder)
    assert event.rollouts[0].versions == [0, 0, 1, 1]
    decoder.submit(LATER_TURN)
    run(decoder)
    assert [salt for *_, salt in core.added] == ["0", "0"]


def test_no_cache_of_other_weights_is_used_once_a_version_is_published_again():
    core = FakeCore()
    decoder = decoder_on(core)
    decoder.set_version(1)
    decoder.submit(GroupRequest(0, 0, (5,), 1, first_episode=7))
    run(decoder)
    decoder.set_version(1)
    decoder.submit(LATER_TURN)
    run(decoder)
    assert [salt for *_, salt in core.added] == ["1", "2"]


def test_a_token_that_is_handed_over_after_a_publish_has_the_version_that_sampled_it():
    """vLLM hands over the tokens of a step while it computes the next one."""

    class HandsOverLater(FakeCore):
        held: tuple[Output, ...] = ()

        def step(self):
            outputs, self.held = self.held, tuple(super().step())
            return outputs

    decoder = decoder_on(HandsOverLater())
    decoder.submit(GroupRequest(0, 0, (5,), 1))
    run(decoder, 4)
    decoder.set_version(1)
    (event,) = run(decoder)
    assert event.rollouts[0].versions == [0, 0, 0, 1]


@pytest.mark.parametrize("recompute", [False, True])
def test_caches_are_computed_anew_only_if_that_is_set(recompute):
    core = FakeCore()
    decoder_on(core, recompute=recompute).set_version(1)
    assert core.recomputed == recompute


def test_images_are_prepared_once_per_request_and_every_rollout_reads_them():
    core = FakeCore()
    decoder = decoder_on(core, slots=1)
    decoder.submit(GroupRequest(0, 0, (5,), 2, images="a"))
    decoder.submit(GroupRequest(1, 1, (6,), 1))
    run(decoder)
    assert core.features_of == [((5,), "a")]
    assert core.log == ["begin 0 with features of a", "begin 1 with features of a"]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_publish_has_images_encoded_anew_before_a_rollout_begins_with_them_again(recompute):
    core = FakeCore(prefill=2)
    decoder = decoder_on(core, recompute=recompute)
    decoder.submit(GroupRequest(0, 0, (5,), 1, images="a"))
    decoder.step()
    decoder.set_version(1)
    caches = ["recompute"] if recompute else []
    again = ["abort 0", "forget images", "begin 1 with features of a"]
    assert core.log == ["begin 0 with features of a", *caches, *again]


def test_a_request_whose_images_vllm_does_not_find_is_refused_alone():
    core = FakeCore()
    decoder = decoder_on(core)
    with pytest.raises(ValueError, match="finds 0 of 1 images"):
        decoder.submit(GroupRequest(0, 0, (5,), 2, images="misplaced"))
    assert decoder.idle
    decoder.submit(GroupRequest(1, 1, (5,), 1, images="a"))
    assert [event.request_id for event in run(decoder)] == [1]


def test_nothing_follows_what_was_cancelled_and_its_place_is_free():
    core = FakeCore()
    decoder = decoder_on(core, slots=2)
    for number in range(2):
        decoder.submit(GroupRequest(number, number, (5,), 2))
    run(decoder, 2)
    decoder.cancel([0, 99])
    assert not core.sequences
    assert [event.request_id for event in run(decoder)] == [1] and decoder.tokens == 10


def test_a_score_leaves_rollouts_as_they_are_and_lets_them_go_on():
    core = FakeCore()
    decoder = decoder_on(core)
    decoder.submit(GroupRequest(0, 0, (5,), 2))
    decoder.step()
    assert decoder.score([5, 6, 7], [8, 9, 10]) == [-3.0, -4.0, -5.0]
    (event,) = run(decoder)
    assert [rollout.token_ids for rollout in event.rollouts] == [[7] * 4] * 2


@pytest.mark.parametrize("finish", ["length", "abort"])
def test_a_completion_that_vllm_cut_fails_its_request(finish):
    core = FakeCore()
    decoder = decoder_on(core)
    decoder.submit(GroupRequest(0, 0, (5,), 2))
    decoder.step()
    core.finish["0"] = finish
    (event,) = run(decoder)
    assert isinstance(event, GroupFailed) and repr(finish) in event.reason
    assert decoder.idle and not decoder.active_rollouts


def test_seeds_depend_on_the_request_the_rollout_and_the_position_alone():
    def seeds_of(first: int, request: GroupRequest) -> list[int]:
        core = FakeCore()
        decoder = decoder_on(core, seeds=True)
        for number in range(first):
            decoder.submit(GroupRequest(100 + number, 100 + number, (5,), 1))
        decoder.submit(request)
        run(decoder)
        return [added[2]["seed"] for added in core.added if added[1] == list(request.prompt_ids)]

    group = seeds_of(0, GroupRequest(0, 5, (6,), 3))
    assert seeds_of(2, GroupRequest(9, 5, (6,), 3)) == group and len(set(group)) == 3
    assert seeds_of(0, GroupRequest(0, 5, (6,), 1, first_rollout=2)) == group[2:]
    assert seeds_of(0, GroupRequest(0, 5, (6,), 1, first_position=1)) != group[:1]


@pytest.mark.parametrize(
    "request_", [GroupRequest(0, 0, (), 1), GroupRequest(0, 0, (50,), 1), GroupRequest(0, 0, (5,) * 9, 1)]
)
def test_prompts_that_do_not_fit_are_refused(request_):
    with pytest.raises(ValueError, match="Request 0"):
        decoder_on(FakeCore()).submit(request_)
