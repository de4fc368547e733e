"""Worlds in which a run takes place: options, rewards, callbacks and clocks that are drawn from a seed, and often do
what they should not.

Guarantees: a seed always gives the same world; `World.faults` names what in it has to end the run, so that a run that
ends otherwise is noticed.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.runs import COMPLETE
from tests.tiny import tiny_prompts
from trl_a3po.objectives.table import OBJECTIVES
from trl_a3po.testing import StubEngine

ROWS = 24


class CallbackFault(Exception):
    """What a callback raises on purpose."""


class SlowEngine(StubEngine):
    """Finishes groups late, in another order, and is slow to take them."""

    def __init__(self, seed: int):
        super().__init__(COMPLETE)
        self._noise, self._late = random.Random(seed), []

    def submit(self, requests):
        time.sleep(self._noise.random() * 0.004)
        super().submit(requests)

    def wait(self, timeout):
        self._late += super().wait(min(timeout, 0.002))
        self._noise.shuffle(self._late)
        now = self._noise.randint(0, len(self._late))
        ready, self._late = self._late[:now], self._late[now:]
        return ready

    def cancel(self, request_ids):
        super().cancel(request_ids)
        self._late = [event for event in self._late if event.request_id not in set(request_ids)]


@dataclass
class World:
    """One draw.

    Args:
        settings: of the config and of the trainer.
        rewards, callbacks: of the run; each callback gets the trainer as `trainer`.
        members: what was drawn, for messages and counts.
        faults: what has to end the run: words of the error, or the class of a callback's own.
        jumps: seconds by which `time.time` jumps.
    """

    settings: dict[str, Any]
    rewards: list[Callable[..., Any]] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    jumps: list[float] = field(default_factory=list)


def draw_world(seed: int) -> World:
    dice = random.Random(seed)
    world = World(_options(dice))
    world.members.append(f"{world.settings['schedule']}, {world.settings['objective']}")
    for _ in range(dice.choice([1, 1, 2])):
        name = dice.choices(list(REWARDS), [weight for weight, _, _ in REWARDS.values()])[0]
        _, make, fault = REWARDS[name]
        world.rewards.append(make(dice))
        _note(world, name, fault)
    for _ in range(dice.choice([0, 1, 1, 2])):
        name = dice.choices(list(CALLBACKS), [weight for weight, _, _ in CALLBACKS.values()])[0]
        _, make, fault = CALLBACKS[name]
        world.callbacks.append(make(dice))
        _note(world, name, fault)
    if dice.random() < 0.4:
        world.jumps = [dice.choice([-86_400.0, -3.0, 3.0, 86_400.0]) for _ in range(3)]
        world.members.append("a clock that jumps")
    return world


def _note(world: World, name: str, fault: str | None) -> None:
    world.members.append(name)
    if fault is not None:
        world.faults.append(fault)


# --- options --------------------------------------------------------------------------------------------------------


def _options(dice: random.Random) -> dict[str, Any]:
    generations = dice.choice([2, 4])
    options: dict[str, Any] = {
        "schedule": dice.choice(["async", "async", "sync", "periodic", "fixed_lag"]),
        "objective": dice.choice(["decoupled", "decoupled", "asympo", "spo", "masked_is", "aipo", "m2po"]),
        "max_staleness": dice.choice([0, 1, 2, 3]),
        "num_generations": generations,
        "per_device_train_batch_size": generations * dice.choice([1, 2]),
        "gradient_accumulation_steps": dice.choice([1, 2]),
        "num_iterations": dice.choice([1, 1, 2]),
        "max_steps": dice.randint(2, 5),
        "beta": dice.choice([0.0, 0.0, 0.05]),
        "seed": dice.randrange(1000),
        "learning_rate": 0.05,
    }
    if dice.random() < 0.9:
        options |= {need.setting: need.values[0] for need in OBJECTIVES[options["objective"]].needs}
    if dice.random() < 0.2:
        options["weight_sync_steps"] = 2
    if dice.random() < 0.25 and options["schedule"] != "fixed_lag":
        options["drop_zero_variance_groups"] = True
    if dice.random() < 0.25:
        options["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    if dice.random() < 0.3:
        options |= {
            "eval_dataset": tiny_prompts(2),
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_eval_batch_size": generations,
        }
    if dice.random() < 0.3:
        options |= {"save_strategy": "steps", "save_steps": dice.choice([1, 2])}
    options["engine"] = SlowEngine(dice.randrange(1000)) if dice.random() < 0.5 else StubEngine(COMPLETE)
    return options


# --- rewards --------------------------------------------------------------------------------------------------------


def _values(completion_ids):
    return [float(sum(ids) % 7) + number for number, ids in enumerate(completion_ids)]


def _steady(dice):
    return lambda completion_ids, **kwargs: _values(completion_ids)


def _slow(dice):
    def slow(completion_ids, **kwargs):
        time.sleep(dice.random() * 0.02)
        return _values(completion_ids)

    return slow


def _awaited(dice):
    async def awaited(completion_ids, **kwargs):
        await asyncio.sleep(dice.random() * 0.02)
        return _values(completion_ids)

    return awaited


def _for_some(dice):
    return lambda completion_ids, **kwargs: [
        None if number % 3 == 1 else value for number, value in enumerate(_values(completion_ids))
    ]


def _mutates(dice):
    def mutates(prompts, completions, completion_ids, target, **kwargs):
        values = _values(completion_ids)
        for column in (prompts, completions, target):
            column.clear()
        for ids in completion_ids:
            ids.clear()
        return values

    return mutates


def _seeds(dice):
    def seeds(completion_ids, **kwargs):
        torch.manual_seed(0)
        random.seed(0)
        return _values(completion_ids)

    return seeds


def _moves(dice):
    def moves(completion_ids, **kwargs):
        before = os.getcwd()
        os.chdir("/")
        print("somewhere else", flush=True)
        os.chdir(before)
        return _values(completion_ids)

    return moves


def _changes_state(dice):
    def changes_state(completion_ids, trainer_state, **kwargs):
        trainer_state.global_step = 99
        trainer_state.log_history.clear()
        return _values(completion_ids)

    return changes_state


def _alarm(dice):
    def alarm(completion_ids, **kwargs):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return _values(completion_ids)

    return alarm


def _equal(dice):
    """No spread in half of the groups."""
    return lambda completion_ids, target, **kwargs: [
        float(number * (target[0] % 2)) for number in range(len(completion_ids))
    ]


def _raises(dice):
    def raises(completion_ids, **kwargs):
        raise KeyError("gold")

    return raises


def _not_a_number(dice):
    def not_a_number(completion_ids, **kwargs):
        return [float("nan")] * len(completion_ids)

    return not_a_number


def _too_few(dice):
    def too_few(completion_ids, **kwargs):
        return _values(completion_ids)[:-1]

    return too_few


def _text(dice):
    def text(completion_ids, **kwargs):
        return ["good"] * len(completion_ids)

    return text


REWARDS: dict[str, tuple[float, Callable[[random.Random], Any], str | None]] = {  # weight, function, fault
    "a steady reward": (6, _steady, None),
    "a slow reward": (3, _slow, None),
    "an awaited reward": (3, _awaited, None),
    "a reward for some completions": (2, _for_some, None),
    "a reward that changes its arguments": (2, _mutates, None),
    "a reward that changes the state": (2, _changes_state, None),
    "a reward without spread": (2, _equal, None),
    # These get a process of their own, which takes seconds to start.
    "a reward that asks for a signal": (0.1, _alarm, None),
    "a reward that seeds": (0.1, _seeds, None),
    "a reward that changes the folder": (0.1, _moves, None),
    "a reward that raises": (0.5, _raises, "'raises' raised KeyError"),
    "a reward that is no number": (0.5, _not_a_number, "'not_a_number'"),
    "a reward that is too short": (0.5, _too_few, "'too_few'"),
    "a reward that is text": (0.5, _text, "'text'"),
}


# --- callbacks ------------------------------------------------------------------------------------------------------


class Odd(TrainerCallback):
    """Calls `act(args, state, control, model)` at the events of these names, from a step on."""

    trainer: Any = None

    def __init__(self, act: Callable[..., None], *events: str, step: int = 0):
        for event in events:
            setattr(self, event, self._acting(act, step))

    def _acting(self, act, step):
        def on_event(args, state, control, model=None, **kwargs):
            if state.global_step >= step:
                act(self, args, state, control, model)

        return on_event


EVENTS = ("on_step_begin", "on_step_end", "on_substep_end", "on_epoch_begin", "on_log", "on_optimizer_step")


def _flags(dice):
    flags = [dice.choice(["should_save", "should_evaluate", "should_log"]) for _ in range(2)]

    def act(self, args, state, control, model):
        for flag in flags:
            if flag != "should_evaluate" or self.trainer.eval_dataset is not None:
                setattr(control, flag, True)

    return Odd(act, dice.choice(EVENTS))


def _nudges(dice):
    """Changes the weights beside the optimizer."""

    def act(self, args, state, control, model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)

    return Odd(act, dice.choice(["on_step_end", "on_step_begin", "on_train_begin"]))


def _averages(dice):
    """Puts other weights in, evaluates, and puts the trained ones back."""

    def act(self, args, state, control, model):
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        if self.trainer.eval_dataset is not None:
            self.trainer.evaluate()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)

    return Odd(act, "on_step_end")


def _toggles(dice):
    def act(self, args, state, control, model):
        model.eval()
        if dice.random() < 0.5:
            model.train()

    return Odd(act, dice.choice(EVENTS))


def _slower_learning(dice):
    def act(self, args, state, control, model):
        args.learning_rate = 0.01
        args.logging_steps = 2
        for group in self.trainer.optimizer.param_groups:
            group["lr"] *= 0.9

    return Odd(act, "on_step_end")


def _own_logs(dice):
    def act(self, args, state, control, model):
        self.trainer.log({"mine": 1.0})

    return Odd(act, dice.choice(["on_step_end", "on_step_begin"]))


def _gives_up(dice):
    step = dice.randint(1, 3)

    def act(self, args, state, control, model):
        control.should_training_stop = True

    return Odd(act, "on_step_end", step=step)


def _raising(dice):
    def act(self, args, state, control, model):
        raise CallbackFault("a callback has had enough")

    return Odd(act, dice.choice(["on_step_begin", "on_step_end", "on_log", "on_train_begin"]), step=0)


def _changes(name, value):
    def make(dice):
        def act(self, args, state, control, model):
            setattr(args, name, value)

        return Odd(act, "on_step_end", step=1)

    return make


CALLBACKS: dict[str, tuple[float, Callable[[random.Random], Any], str | None]] = {
    "odd flags": (4, _flags, None),
    "weights that are nudged": (3, _nudges, None),
    "weights that are averaged": (3, _averages, None),
    "modes that are toggled": (3, _toggles, None),
    "another learning rate": (2, _slower_learning, None),
    "logs of its own": (2, _own_logs, None),
    "a stop": (2, _gives_up, None),
    "a callback that raises": (1, _raising, "CallbackFault"),
    "another temperature": (0.7, _changes("temperature", 0.5), "temperature"),
    "another max_staleness": (0.7, _changes("max_staleness", 9), "max_staleness"),
    "another number of generations": (0.7, _changes("num_generations", 8), "num_generations"),
}
