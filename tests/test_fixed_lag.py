"""`schedule="fixed_lag"`: exactly so stale, and the same run whatever the timing."""

import random
import time

import pytest
import torch
from transformers import TrainerCallback

from tests.runs import TakeRecorder
from tests.tiny import VOCAB, tiny_prompts
from trl_a3po import A3POConfig
from trl_a3po.errors import GenerationFailed
from trl_a3po.protocol.records import Rejection
from trl_a3po.testing import StubEngine, scripted_completion

pytestmark = pytest.mark.long

TIMINGS = (
    "a3po/time",
    "a3po/engine",
    "a3po/delivery",
    "a3po/queue",
    "runtime",
    "per_second",
    "step_time",
    "reward_time",
    "profiling",
)


class SlowEngine(StubEngine):
    """Takes a random time over each message and keeps those it was given."""

    def __init__(self, seed: int):
        super().__init__(scripted_completion(VOCAB, 8))
        self.delays = random.Random(seed)
        self.messages = []

    def submit(self, requests):
        self.messages.append((self.version, [request.noise_key for request in requests]))
        time.sleep(self.delays.random() / 100)
        super().submit(requests)


class Recorder(TakeRecorder):
    """Each take as plain values: version, stamps, prompts, tokens."""

    def _take(self):
        rows = super()._take()
        version, groups = self.takes.pop()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        stamps = {stamp for rollout in rollouts for stamp in rollout.versions}
        indices = [group.prompt.index for group in groups]
        self.takes.append((version, stamps, indices, [rollout.token_ids for rollout in rollouts]))
        return rows


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            control.should_training_stop = True


def train(
    folder, model_path, engine="transformers", reward_seed=0, stop_at=1000, resume=False, on_group=None, **settings
):
    """`reward_seed=None`: a reward without a state and without delays."""
    delays = random.Random(reward_seed)
    seen = []

    def reward(completion_ids, trainer_state, **kwargs):
        if reward_seed is not None:  # it notices another order
            time.sleep(delays.random() / 200)
            seen.append(len(completion_ids))
        return [(sum(ids) + len(seen) + 3 * trainer_state.global_step) % 13 / 12 for ids in completion_ids]

    args = A3POConfig(
        output_dir=str(folder),
        schedule="fixed_lag",
        log_all_metrics=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=8,
        engine=engine,
        engine_threads=1,
        engine_slots=5,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **{"max_steps": 8, "max_staleness": 2, "save_strategy": "no", **settings},
    )
    trainer = Recorder(
        model_path, reward, args=args, train_dataset=tiny_prompts(), eval_dataset=tiny_prompts(4),
        callbacks=[StopAt(stop_at)], on_group=on_group,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def timeless(history):
    return [{k: v for k, v in entry.items() if not any(word in k for word in TIMINGS)} for entry in history]


@pytest.mark.parametrize(
    "lag, settings",
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (4, {}),
        (2, {"num_iterations": 2}),
        (4, {"num_iterations": 2, "weight_sync_steps": 2}),
    ],
)
def test_every_batch_is_sampled_by_exactly_the_policy_that_many_steps_before(tmp_path, model_path, lag, settings):
    engine = SlowEngine(0)
    trainer = train(tmp_path, model_path, engine, max_staleness=lag, **settings)
    assert [(step, stamps) for step, stamps, _, _ in trainer.takes] == [
        (step, {max(0, step - lag)}) for step in range(0, 8, settings.get("num_iterations", 1))
    ]
    assert [keys for _, keys in engine.messages if keys] == [
        [2 * n, 2 * n + 1] for n in range(len(trainer.takes))
    ]  # one message each
    assert [index for _, _, indices, _ in trainer.takes for index in indices] == list(range(2 * len(trainer.takes)))


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}


@pytest.mark.parametrize("settings", [{}, EVALUATED, {"num_iterations": 2, "weight_sync_steps": 2, **EVALUATED}])
def test_timing_changes_nothing(tmp_path, model_path, settings):
    """Not even what a reward with a state sees, nor the trainer's state that it receives."""
    runs = [
        train(tmp_path / str(seed), model_path, SlowEngine(seed), reward_seed=seed, **settings) for seed in range(3)
    ]
    for other in runs[1:]:
        assert other.takes == runs[0].takes
        assert timeless(other.state.log_history) == timeless(runs[0].state.log_history)
        for ours, theirs in zip(other.model.parameters(), runs[0].model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.long
def test_the_engines_process_samples_the_same_run_twice(tmp_path, model_path):
    """Bitwise equal: tokens, log-probs, rewards, losses, every metric but the times, and the final parameters; on one
    machine, on a CPU, with the same thread counts, slots and library versions."""
    first, second = (train(tmp_path / str(i), model_path, reward_seed=i, max_steps=6) for i in range(2))
    assert first.takes == second.takes
    assert timeless(first.state.log_history) == timeless(second.state.log_history)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_evaluation_and_checkpoints_leave_the_run_as_it_is(tmp_path, model_path):
    plain = train(tmp_path / "plain", model_path, SlowEngine(0))
    watched = train(
        tmp_path / "watched", model_path, SlowEngine(1), save_strategy="steps", save_steps=3, eval_strategy="steps",
        eval_steps=2, per_device_eval_batch_size=4, reward_seed=None,
    )  # fmt: skip
    assert [(step, stamps, indices) for step, stamps, indices, _ in watched.takes] == [
        (step, stamps, indices) for step, stamps, indices, _ in plain.takes
    ]


@pytest.mark.long
@pytest.mark.parametrize("settings, taken_before", [({}, 3), ({"num_iterations": 2}, 2)])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path, model_path, settings, taken_before):
    """With two iterations it goes on in the middle of a batch."""
    settings = {"reward_seed": None, **settings}
    whole = train(tmp_path / "whole", model_path, **settings)
    train(tmp_path / "cut", model_path, save_strategy="steps", save_steps=3, stop_at=5, **settings)
    resumed = train(tmp_path / "cut", model_path, resume=True, **settings)
    assert resumed.takes == whole.takes[taken_before:]
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rejected_group_ends_the_run_with_what_to_set(tmp_path, model_path):
    with pytest.raises(GenerationFailed, match=r"prompt 0 was rejected \(too short\).*schedule='async'"):
        train(tmp_path, model_path, SlowEngine(0), on_group=lambda group: Rejection("too short"))
