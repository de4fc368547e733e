"""Episodes in a run of `A3POTrainer`: failures that end it, evaluations, a resume, and weights that change in an
episode."""

import os
import threading
import time
from typing import ClassVar

import pytest
import torch

from tests.episodes.apart import Apart
from tests.episodes.chat import call, chat_model, chat_tokenizer, questions, results_in, said
from tests.runs import GENERATIONS, TakeRecorder, build, logged
from tests.workers.processes import is_gone
from trl_a3po import A3POTrainer, EpisodeResult
from trl_a3po.errors import GenerationFailed, StallError
from trl_a3po.protocol.engine import EngineStats
from trl_a3po.testing import StubEngine

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")]


class Environment:
    """Counts its calls; `fails` says in which of its methods it raises."""

    made: ClassVar[list] = []
    fails = ""
    _gate = None

    def __init__(self):
        self.closes = 0
        type(self).made.append(self)

    def reset(self, number, **row):
        self._at("reset")
        self.calls = 0
        return f" {number}"

    def step(self, k: int) -> int:
        """Does a step.

        Args:
            k: a number

        Returns:
            the number of calls
        """
        self._at("step")
        self.calls += 1
        return self.calls

    def get_reward(self):
        self._at("get_reward")
        return float(self.calls)

    def close(self):
        self.closes += 1

    def _at(self, where):
        if type(self).fails == where:
            raise ConnectionError(f"lost in {where}")
        if type(self)._gate is not None:
            type(self)._gate(where)


@pytest.fixture(autouse=True)
def fresh():
    Environment.made, Environment.fails, Environment._gate = [], "", None


def play(prompt_ids, number: int) -> list[int]:
    done = results_in(prompt_ids)
    return said(call("step", k=done)) if done < number else said(f"end {number}")


def trainer_of(tmp_path, trainer_class=A3POTrainer, complete=play, **settings):
    settings = {
        "environment_factory": Environment, "train_dataset": questions(), "reward_funcs": None, "max_steps": 2,
        "max_completion_length": 400, "engine": StubEngine(complete), "max_staleness": 1, **settings,
    }  # fmt: skip
    return build(chat_model(), tmp_path, trainer_class, processing_class=chat_tokenizer(), **settings)


def closed_once():
    return [environment.closes for environment in Environment.made] == [1] * len(Environment.made)


def test_close_is_no_tool_and_every_instance_is_closed_once(tmp_path):
    trainer = trainer_of(tmp_path)
    assert [tool.__name__ for tool in trainer.tools] == ["step"]
    trainer.train()
    assert closed_once() and len(Environment.made) > GENERATIONS


def test_the_environments_of_the_last_batch_can_be_read_after_training(tmp_path):
    trainer = trainer_of(tmp_path, max_staleness=0, max_steps=1)
    trainer.train()
    calls = [environment.calls for environment in trainer.environments]
    assert calls == [*range(GENERATIONS)] * (len(calls) // GENERATIONS) and calls


@pytest.mark.parametrize("where", ["reset", "get_reward"])
def test_an_environment_that_always_fails_ends_the_run_with_its_words(tmp_path, where):
    Environment.fails = where
    with pytest.raises(GenerationFailed, match=rf"failed 2 times.*lost in {where}"):
        trainer_of(tmp_path, max_attempts=2).train()
    assert closed_once()


def test_environments_are_refused_to_reward_workers(tmp_path):
    def sees(environments, **kwargs):
        return [0.0] * len(environments)

    with pytest.raises(ValueError, match=r"reward_workers=1, but the reward function 'sees' asks for `environments`"):
        trainer_of(tmp_path, reward_funcs=sees, reward_workers=1)
    assert len(Environment.made) == 1 and closed_once()


def apart(tmp_path, **attributes):
    """The class, with its attributes, as a script would define it: it is pickled by value."""
    made = type("Apart", (Apart,), {"folder": str(tmp_path), **attributes})
    made.__module__ = "__main__"
    return made


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.long)])
def test_environments_in_processes_train_are_closed_once_and_may_die(tmp_path, dies):
    notes = tmp_path / "notes"
    notes.mkdir()
    trainer = trainer_of(
        tmp_path, environment_factory=apart(notes, dies=dies), environment_processes=True, max_staleness=0, max_steps=1
    )
    trainer.train()
    assert logged(trainer, "rewards/Apart/mean") == [1.5]
    killed = 0
    for path in notes.glob("[0-9]*"):
        closes = path.read_text().count("close")
        assert int(path.name) != os.getpid() or path.read_text() == "close\n"  # TRL's own, which is not used
        killed += closes == 0
        assert (closes <= 1 and is_gone(int(path.name))) or int(path.name) == os.getpid()
    assert killed == dies


def test_environments_in_processes_are_refused_where_they_cannot_be(tmp_path):
    def sees(environments, **kwargs):
        return [0.0] * len(environments)

    with pytest.raises(ValueError, match=r"environment_processes=True, but the reward function 'sees' asks for"):
        trainer_of(tmp_path, reward_funcs=sees, environment_processes=True)
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"environment_processes=True, but environment_factory cannot be sent to a"):
        trainer_of(tmp_path, environment_factory=lambda: Environment() if lock else None, environment_processes=True)


def test_a_tool_may_not_have_the_name_of_an_environments_method(tmp_path):
    def step(k: int) -> int:
        """Does a step.

        Args:
            k: a number

        Returns:
            the number
        """
        return k

    with pytest.raises(ValueError, match=r"tools and environment_factory both hold 'step'"):
        trainer_of(tmp_path, tools=[step])


def test_what_episodes_cost_is_logged(tmp_path):
    engine = StubEngine(play)
    engine.stats = lambda: EngineStats(turns_prefilled_again=3)
    trainer = trainer_of(tmp_path, engine=engine)
    trainer.train()
    assert logged(trainer, "a3po/engine/turns_prefilled_again") == [3.0, 3.0]
    assert logged(trainer, "a3po/episodes/turns") == [2.5, 2.5]
    assert logged(trainer, "a3po/episodes/cut_off") == logged(trainer, "a3po/episodes/tool_timeouts") == [0.0, 0.0]
    assert all(seconds >= 0 for seconds in logged(trainer, "a3po/episodes/tool_seconds"))
    assert all(0 <= span <= 1 for span in logged(trainer, "a3po/episodes/version_span"))


def test_a_tool_that_always_fails_is_told_and_counted(tmp_path):
    Environment.fails = "step"
    trainer = trainer_of(tmp_path)
    trainer.train()
    assert logged(trainer, "tools/failure_frequency") == [1.0, 1.0] and closed_once()


@pytest.mark.parametrize("where", ["reset", "step", "get_reward"])
def test_a_call_that_hangs_is_named_by_the_stall_report(tmp_path, where):
    leave = threading.Event()
    Environment._gate = lambda here: here == where and leave.wait(60)
    try:
        with pytest.raises(
            StallError, match=rf"prompt \d+, rollout \d, turn \d, .*{where}.* for \d.*Set tool_timeout"
        ):
            trainer_of(tmp_path, stall_timeout=1.0).train()
    finally:
        leave.set()
    assert closed_once()


@pytest.mark.parametrize("where", ["reset", "step", "get_reward"])
def test_an_interrupt_in_the_middle_of_a_call_closes_every_instance_once(tmp_path, where, monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def gate(here):
        if here == where:
            entered.set()
            leave.wait(60)

    Environment._gate = gate
    trainer = trainer_of(tmp_path)
    take = A3POTrainer._take

    def interrupted(self):
        entered.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(A3POTrainer, "_take", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    leave.set()
    monkeypatch.setattr(A3POTrainer, "_take", take)
    assert closed_once() and time.monotonic() - began < 60


def test_an_evaluation_plays_episodes_of_its_own(tmp_path):
    seen = []

    def evaluated(prompts, environments, **kwargs):
        seen.extend(
            (prompt[-1]["content"], environment.calls)
            for prompt, environment in zip(prompts, environments, strict=True)
        )
        return [0.0] * len(prompts)

    trainer = trainer_of(
        tmp_path, reward_funcs=evaluated, eval_dataset=questions(2), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=GENERATIONS,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "eval_rewards/Environment/mean") == [1.5, 1.5] and closed_once()
    assert {calls for _, calls in seen} == set(range(GENERATIONS))
    assert all(content.endswith(f" {content[1]}") for content, _ in seen)  # what reset has added


def test_an_evaluation_outside_of_training_is_grpos_own(tmp_path):
    trainer = trainer_of(tmp_path, eval_dataset=questions(2), per_device_eval_batch_size=GENERATIONS)
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/Environment/mean"] == 0.0


async def two_turns(episode):
    turn = await episode.sample(list(episode.prompt))
    episode.append([{"role": "user", "content": "more"}])
    await episode.sample()
    return EpisodeResult(float(episode.number), columns={"first": turn.text})


def test_a_rollout_function_trains_beside_reward_functions(tmp_path):
    seen = []

    def first_is_known(completions, first, prompts, **kwargs):
        seen.append((first, [len(messages) for messages in completions]))
        return [0.5] * len(prompts)

    trainer = trainer_of(
        tmp_path, TakeRecorder, environment_factory=None, rollout_func=two_turns, reward_funcs=[first_is_known],
        complete=lambda ids, number: said(f"say {number}"), log_completions=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.reward_func_names == ["first_is_known", "two_turns"]
    assert logged(trainer, "rewards/two_turns/mean") == [1.5, 1.5]
    assert seen[0] == ([f"say {n}" for n in range(GENERATIONS)], [3] * GENERATIONS)
    assert [message["role"] for message in trainer._logs["completion"][0]] == ["assistant", "user", "assistant"]


def test_a_rollout_function_is_refused_in_an_evaluation_outside_of_training(tmp_path):
    trainer = trainer_of(
        tmp_path, environment_factory=None, rollout_func=two_turns, eval_dataset=questions(2),
        per_device_eval_batch_size=GENERATIONS,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"evaluate\(\) outside of train\(\) cannot play"):
        trainer.evaluate()


def test_weights_may_change_in_the_middle_of_an_episode(tmp_path):
    waits = threading.Event()

    class Held(Environment):
        made: ClassVar[list] = []

        def reset(self, number, **row):
            super().reset(number)
            self.number = number

        def step(self, k: int) -> int:
            """Does a step.

            Args:
                k: a number

            Returns:
                the number of calls
            """
            if self.number > 1:  # the second batch, which is sampled ahead of the first optimizer step
                waits.wait(60)
            return super().step(k)

    class Publishes(StubEngine):
        def publish(self, update):
            super().publish(update)
            if update.version == 1:
                waits.set()

    trainer = trainer_of(
        tmp_path, TakeRecorder, environment_factory=Held, engine=Publishes(play), shuffle_dataset=False
    )
    trainer.train()
    _, (version, second) = trainer.takes
    spans = [sorted({v for v in rollout.versions if v >= 0}) for group in second for rollout in group.rollouts]
    assert version == 1 and [0, 1] in spans and all(max(span) <= 1 for span in spans)
    staleness = logged(trainer, "a3po/staleness/max")
    assert staleness == [0.0, 1.0]


def test_a_resumed_run_keeps_scored_episodes_and_begins_the_others_again(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "max_staleness": 2}
    whole = trainer_of(tmp_path / "whole", TakeRecorder, schedule="fixed_lag", **settings)
    whole.train()
    half = trainer_of(tmp_path / "half", TakeRecorder, schedule="fixed_lag", **settings)
    half.train()
    resumed = trainer_of(tmp_path / "half", TakeRecorder, schedule="fixed_lag", **settings)
    resumed.train(str(tmp_path / "half" / "TakeRecorder" / "checkpoint-1"))
    for (_, group), (_, again) in zip(whole.groups[-2 * 2 :], resumed.groups, strict=True):
        for one, other in zip(group.rollouts, again.rollouts, strict=True):
            assert (one.token_ids, one.versions) == (other.token_ids, other.versions)
            assert one.episode.messages == other.episode.messages and one.episode.prompt == other.episode.prompt
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert closed_once()
