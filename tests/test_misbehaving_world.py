"""Runs in worlds that misbehave, drawn from seeds: each ends well, or with an error that names what to set, and what
was trained is what the oracle says."""

import itertools
import math
import re
import threading
import time
from collections import Counter
from dataclasses import fields

import pytest

from tests.misbehaving import ROWS, CallbackFault, World, draw_world
from tests.runs import build, logged
from tests.tiny import tiny_prompts
from trl_a3po import A3POConfig
from trl_a3po.errors import A3POError
from trl_a3po.report.timeline import read_timeline

pytestmark = pytest.mark.long

SETTINGS = {setting.name for setting in fields(A3POConfig)}
CHANGED = {"temperature", "max_staleness", "num_generations"}  # settings that a callback changes after the first step
DEFAULT, LONG, SLOW = range(24), range(24, 64), range(64, 124)


def run_of(world: World, model_path, folder):
    """The trainer, or `None` if the settings are refused, and the error that ended the run, if any."""
    try:
        trainer = build(
            model_path,
            folder,
            reward_funcs=world.rewards,
            callbacks=world.callbacks,
            train_dataset=tiny_prompts(ROWS),
            stall_timeout=300.0,
            **world.settings,
        )
    except ValueError as error:
        return None, error
    for callback in world.callbacks:
        callback.trainer = trainer
    try:
        trainer.train()
    except (A3POError, ValueError, RuntimeError, CallbackFault) as error:
        return trainer, error
    return trainer, None


def check_error(world: World, error: Exception, trained: bool) -> None:
    """The error is that of a fault of the world, or refuses its settings, and says what to set or which function."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, CallbackFault):
        assert "CallbackFault" in world.faults
        return
    named = SETTINGS & set(re.findall(r"\w+", text))
    assert named or "reward function" in text, text
    if trained:
        assert any(fault in text for fault in world.faults), text


def check_what_was_trained(world: World, trainer, folder, ended_well: bool) -> None:
    """Every prompt that was taken is trained once, in the order of the stream, within the bound on staleness; nothing
    is counted twice; the parameters are numbers."""
    args = trainer.args
    timeline = folder / "A3POTrainer" / "timeline.jsonl"
    groups = read_timeline(timeline, "group") if ended_well or timeline.exists() else []
    trained = [group for group in groups if group["outcome"] == "trained"]
    prompts = Counter(group["prompt"] for group in trained)
    assert not prompts or set(prompts.values()) == {1}
    assert max(Counter((group["prompt"], group["attempt"]) for group in groups).values(), default=0) <= 1
    for group in trained:
        oldest = group["oldest"] if group["oldest"] is not None else group["taken_version"]
        assert 0 <= group["taken_version"] - oldest <= args.staleness_bound
    micro_steps = trainer.state.global_step * args.gradient_accumulation_steps
    if ended_well:
        takes = math.ceil(micro_steps / args.micro_steps_per_take)
        assert len(trained) == takes * args.groups_per_take
        if not args.drop_zero_variance_groups:
            assert set(prompts) == set(range(len(trained)))
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def check_nothing_is_left(world: World, trainer) -> None:
    engine = world.settings["engine"]
    assert trainer._session is None and (engine.closed or engine.version is None)  # closed, or never started
    deadline = time.monotonic() + 20
    while names := [t.name for t in threading.enumerate() if t.name in ("a3po rollout thread", "a3po reward thread")]:
        assert time.monotonic() < deadline, names
        time.sleep(0.01)


def live_in(world: World, model_path, folder, monkeypatch) -> str:
    """Run in the world, check everything, and say how the run ended."""
    real, shifts = time.time, itertools.chain(itertools.accumulate(world.jumps), itertools.repeat(sum(world.jumps)))
    if world.jumps:
        monkeypatch.setattr(time, "time", lambda: real() + next(shifts))
    trainer, error = run_of(world, model_path, folder)
    if error is not None:
        check_error(world, error, trained=trainer is not None)
    if trainer is None:
        return "refused"
    if error is None:
        takes = [line["version"] for line in read_timeline(folder / "A3POTrainer", "take")]
        noticed = [fault for fault in world.faults if fault not in CHANGED or max(takes) > 0]
        assert not noticed, f"ended well in spite of {noticed}"
        assert trainer.state.global_step == trainer.state.max_steps or "a stop" in world.members
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    check_what_was_trained(world, trainer, folder, ended_well=error is None)
    check_nothing_is_left(world, trainer)
    return "ended well" if error is None else "ended with an error"


@pytest.mark.parametrize(
    "seed",
    [
        *DEFAULT,
        *(pytest.param(seed, marks=pytest.mark.long) for seed in LONG),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW),
    ],
)
def test_a_run_in_a_misbehaving_world_ends_well_or_says_what_to_set(seed, model_path, tmp_path, monkeypatch):
    world = draw_world(seed)
    live_in(world, model_path, tmp_path, monkeypatch)
