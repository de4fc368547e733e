"""Episodes between a queue and an engine: what reaches the engine, what comes back, and how failures end."""

import asyncio
import threading
import time

import pytest

from tests.episodes.chat import TOKENIZER, said, tokens
from tests.episodes.playing import ScriptedEngine, ends, group, played, rollouts_of
from tests.rollout.queue_fakes import update
from tests.workers.processes import until
from trl_a3po.episodes import EpisodeResult
from trl_a3po.protocol.engine import GroupFailed, GroupFinished, GroupProgress


def user(text):
    return {"role": "user", "content": text}


async def two_turns(episode):
    messages = list(episode.prompt)
    turn = await episode.sample(messages)
    messages += [turn.message, user("more")]
    await episode.sample(messages)
    return float(episode.number)


def test_tokens_only_grow_and_only_sampled_ones_have_versions(runner_for):
    engine = ScriptedEngine(lambda ids, number: said(f"turn {number}"))
    rollouts = rollouts_of(runner_for(two_turns, engine), group(2))
    for number, rollout in enumerate(rollouts):
        turn = said(f"turn {number}")
        between = tokens("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
        assert rollout.token_ids == [*turn, *between, *turn]
        assert rollout.versions == [0] * len(turn) + [-1] * len(between) + [0] * len(turn)
        assert [logp != 0 for logp in rollout.logps] == [version == 0 for version in rollout.versions]
        episode = rollout.episode
        assert (episode.turns, episode.first_turn, episode.rewards) == (2, len(turn), {"play": float(number)})
        assert [message["role"] for message in episode.messages] == ["assistant", "user", "assistant"]
        assert episode.end == "done"


def test_first_turns_of_a_group_are_one_request_and_later_ones_say_where_they_are(runner_for):
    engine = ScriptedEngine(lambda ids, number: said("x" * (number + 1)))
    request = group(3, key=7)
    rollouts = rollouts_of(runner_for(two_turns, engine), request)
    first, *later = engine.requests
    assert (first.num_rollouts, first.first_position, first.prompt_ids) == (3, 0, request.prompt_ids)
    assert {one.noise_key for one in engine.requests} == {7}
    assert len({one.request_id for one in engine.requests}) == 4
    for one in later:
        rollout = rollouts[one.first_rollout]
        assert one.prompt_ids == (*request.prompt_ids, *rollout.token_ids[: one.first_position])
        assert one.first_position == rollout.versions.index(-1) + rollout.versions.count(-1)
        assert one.max_new_tokens == 400 - one.first_position


def test_each_turn_has_the_version_it_was_sampled_from(runner_for):
    engine = ScriptedEngine()
    gate = threading.Event()

    async def play(episode):
        await episode.sample()
        await asyncio.to_thread(gate.wait, 30)
        episode.append([user("more")])
        await episode.sample()

    runner, request = runner_for(play, engine), group(1)
    runner.submit([request])
    until(lambda: runner.wait(0.01) == [GroupProgress(request.request_id)])
    runner.publish(update(3))
    gate.set()
    (event,) = ends(runner, [request])
    assert sorted(set(event.rollouts[0].versions)) == [-1, 0, 3]


def test_later_turns_reach_the_engine_before_groups_that_have_not_begun(runner_for):
    engine = ScriptedEngine()
    gates = {0: asyncio.Event(), 1: asyncio.Event()}

    async def play(episode):
        if episode.row["late"]:
            gates[0].set()
            await asyncio.sleep(0)  # both turns are asked for in one round of the event loop
            await episode.sample()
        else:
            await episode.sample()
            episode.append([user("more")])
            await gates[0].wait()
            await episode.sample()

    runner, early = runner_for(play, engine), group(1, late=False)
    runner.submit([early])
    until(lambda: GroupProgress(early.request_id) in runner.wait(0.01))
    late = group(1, late=True)
    runner.submit([late])
    time.sleep(0.05)  # the event loop puts both into the outbox before it is emptied
    ends(runner, [early, late])
    assert [one.first_position > 0 for one in engine.requests] == [False, True, False]


def test_the_engine_is_told_which_episode_a_turn_continues_and_when_it_is_over(runner_for):
    async def play(episode):
        await episode.sample()
        episode.append([user("more")])
        await episode.sample()
        if episode.number == 2:
            raise ValueError("no")

    engine = ScriptedEngine()
    runner = runner_for(play, engine)
    one, other = group(2), group(3)
    played(runner, one, other)
    until(lambda: runner.wait(0.0) == [] and len(engine.ended) == 5)
    assert sorted(engine.ended) == [0, 1, 2, 3, 4]
    episodes = [
        (request.first_position > 0, request.first_episode, request.num_rollouts) for request in engine.requests
    ]
    # Two first turns of a group are one request. So are later turns after the same tokens.
    assert sorted(episodes) == [(False, 0, 2), (False, 2, 3), (True, 0, 2), (True, 2, 3)]


def test_stop_tokens_and_lengths_are_those_of_the_turn(runner_for):
    async def play(episode):
        turn = await episode.sample(stop=["!", 5], max_new_tokens=4)
        assert turn.finish_reason == "length" and len(turn.token_ids) == 4

    engine = ScriptedEngine(lambda ids, number: tokens("abcdefgh"))
    rollouts_of(runner_for(play, engine), group(1))
    assert engine.requests[0].stop_token_ids == (*tokens("!"), 5)
    assert engine.requests[0].max_new_tokens == 4


def test_a_turn_that_does_not_fit_is_full_and_changes_nothing(runner_for):
    turns = []

    async def play(episode):
        await episode.sample()
        turns.append(await episode.sample([*episode.prompt, *episode.messages, user("y" * 100)]))
        before = list(episode.token_ids)
        assert not episode.append([user("y" * 100)]) and episode.token_ids == before

    (rollout,) = rollouts_of(runner_for(play, max_completion_length=50), group(1))
    assert turns[0].finish_reason == "full" and turns[0].text == "" and turns[0].tool_calls == []
    assert rollout.token_ids == said("yes") and rollout.episode.end == "length"


def test_token_ids_of_ones_own_are_continued(runner_for):
    async def play(episode):
        first = await episode.sample([1, 2, 3])
        await episode.sample([1, 2, 3, *first.token_ids, 7, 8])

    (rollout,) = rollouts_of(runner_for(play), group(1))
    yes = said("yes")
    assert rollout.token_ids == [*yes, 7, 8, *yes] and rollout.episode.prompt_ids == [1, 2, 3]


def test_a_result_may_have_messages_columns_and_no_reward(runner_for):
    async def play(episode):
        await episode.sample()
        return EpisodeResult(None, messages=[{"role": "assistant", "content": "short"}], columns={"seen": 3})

    (rollout,) = rollouts_of(runner_for(play), group(1))
    assert rollout.episode.rewards == {"play": None}
    assert rollout.episode.messages == [{"role": "assistant", "content": "short"}]
    assert rollout.episode.columns == {"seen": 3}


def test_a_prompt_may_be_text(runner_for):
    async def play(episode):
        episode.row["changed"] = True
        turn = await episode.sample("once ")
        await episode.sample([*tokens("once "), *turn.token_ids, *tokens(" more")])

    (rollout,) = rollouts_of(runner_for(play), group(1))
    assert rollout.episode.messages == "yes moreyes"


# --- failures ---------------------------------------------------------------------------------------------------


async def rewrites(episode):
    await episode.sample()
    await episode.sample([user("another prompt")])


async def two_at_once(episode):
    await asyncio.gather(episode.sample(), episode.sample())


async def never_samples(episode):
    return 1.0


async def exits(episode):
    raise SystemExit(3)


async def waits_for_ever(episode):
    await episode.sample()
    with episode.waiting_for("tool 'search'"):
        await asyncio.sleep(1000)


async def infinite_reward(episode):
    await episode.sample()
    return float("inf")


async def reward_of_another_kind(episode):
    await episode.sample()
    return "good"


FAILURES = {
    rewrites: "does not begin with the 2 messages of the episode so far",
    two_at_once: "was called while this episode is sampled from",
    never_samples: "before the policy was sampled from",
    exits: "it raised SystemExit",
    waits_for_ever: "longer than episode_timeout=0.3 s, and waited last for tool 'search'",
    infinite_reward: "the reward is inf",
    reward_of_another_kind: "could not convert string to float",
}


@pytest.mark.parametrize("play", FAILURES)
def test_a_failed_episode_fails_its_group_and_no_other(runner_for, play):
    async def either(episode):
        return await (play(episode) if episode.row["bad"] and episode.number == 1 else two_turns(episode))

    dropped = []
    runner = runner_for(either, episode_timeout=0.3 if play is waits_for_ever else None, dropped=dropped.extend)
    failed, finished = played(runner, group(3, bad=True), group(3, bad=False))
    assert isinstance(failed, GroupFailed) and FAILURES[play] in failed.reason and "rollout 1, turn " in failed.reason
    assert isinstance(finished, GroupFinished) and len(finished.rollouts) == 3
    assert len(dropped) == 3


def test_an_engine_that_fails_a_turn_fails_the_group_with_its_reason(runner_for):
    engine = ScriptedEngine(fails=lambda request: "the worker died" if request.first_position else None)
    (event,) = played(runner_for(two_turns, engine), group(2))
    assert isinstance(event, GroupFailed) and "the worker died" in event.reason


def test_a_cancelled_group_has_no_event_and_its_turns_are_cancelled_in_the_engine(runner_for):
    engine, dropped = ScriptedEngine(), []
    engine.held.set()
    runner, request = runner_for(two_turns, engine, dropped=dropped.extend), group(2)
    runner.submit([request])
    until(lambda: runner.wait(0.01) == [] and engine.requests)
    runner.cancel([request.request_id])
    until(lambda: runner.wait(0.01) == [] and engine.cancelled)
    assert engine.cancelled == [engine.requests[0].request_id]
    until(lambda: len(dropped) == 2)
    engine.held.clear()
    assert runner.wait(0.05) == []


def test_a_report_names_prompt_turn_wait_and_seconds(runner_for):
    runner, request = runner_for(waits_for_ever), group(1, key=12)
    assert runner.describe() == ""
    runner.submit([request])
    until(lambda: (runner.wait(0.01) and False) or "tool 'search'" in runner.describe())
    assert "prompt 12, rollout 0, turn 2, tool 'search' for 0." in runner.describe()
    assert "Set tool_timeout and episode_timeout" in runner.describe()


def test_a_report_names_a_function_that_blocks_the_event_loop(runner_for):
    entered, leave = threading.Event(), threading.Event()

    async def blocks_the_loop(episode):
        entered.set()
        leave.wait(60)

    runner, request = runner_for(blocks_the_loop), group(1)
    runner.submit([request])
    until(lambda: (runner.wait(0.01) and False) or entered.is_set())
    report = runner.describe()
    leave.set()
    assert "All episodes wait for blocks_the_loop, which blocks the thread" in report and "test_runner.py" in report
    assert "asyncio.to_thread" in report and "tool_timeout" not in report


def test_an_episode_that_does_not_let_itself_be_cancelled_is_abandoned(runner_for, caplog, monkeypatch):
    monkeypatch.setattr("trl_a3po.episodes.runner.CANCEL_TIMEOUT", 0.1)
    stubborn = asyncio.Event()

    async def play(episode):
        while not stubborn.is_set():
            try:
                await asyncio.wait_for(stubborn.wait(), 1000)
            except asyncio.CancelledError:
                continue

    runner, request = runner_for(play), group(1)
    runner.submit([request])
    until(lambda: runner.wait(0.01) == [] and runner._playing)
    runner.close()
    assert not runner._thread.is_alive()


def test_what_the_engine_is_asked_comes_from_the_thread_that_waits(runner_for):
    engine = ScriptedEngine()
    rollouts_of(runner_for(two_turns, engine), group(2))
    assert engine._threads == {threading.current_thread().name}


def test_a_turn_stopped_by_its_own_token_may_be_followed_by_another(runner_for):
    async def play(episode):
        turn = await episode.sample(stop=[tokens("!")[0]])
        assert turn.text == "wait!"
        await episode.sample()

    engine = ScriptedEngine(lambda ids, number: tokens("wait!") if "wait" not in TOKENIZER.decode(ids) else said("go"))
    (rollout,) = rollouts_of(runner_for(play, engine), group(1))
    assert rollout.token_ids == [*tokens("wait!"), *said("go")] and -1 not in rollout.versions
