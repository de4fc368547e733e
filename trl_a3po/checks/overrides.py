"""Checks of methods that a subclass overrides, or that are replaced on the trainer: what they do is followed, or an
error says what to do instead.

Guarantees: a method that asynchronous generation passes over raises before the first step; one that has to call
`super()` and does not raises in the first step.
"""

import threading
from typing import Any

import torch

from trl_a3po.checks.overridden_methods import METHODS
from trl_a3po.config.border_rows import named
from trl_a3po.rollout.batch_rows import Row, rollouts_of


def check_overrides(trainer: Any, ours: type) -> None:
    """Raise `ValueError` for a method of `trainer` that differs from that of the class `ours` and would be ignored."""
    for name, instead in named(METHODS, "refused"):
        if name in vars(trainer) or getattr(type(trainer), name) is not getattr(ours, name):
            raise ValueError(f"{type(trainer).__name__}.{name} would be ignored, because {instead}.")


def check_thread(method: str, training_thread: int | None) -> None:
    """Raise `RuntimeError` for a method that belongs to the thread that trains, called in another one."""
    if training_thread not in (None, threading.get_ident()):
        raise RuntimeError(
            f"trainer.{method}() was called beside training, which it would disturb: call it in "
            "a callback. A reward function logs by its arguments log_metric and log_extra."
        )


def check_first_preparation(rows: list[Row] | None) -> None:
    """Raise `RuntimeError` if TRL is asked to sample and score while no rows have been taken for it."""
    if rows is None:
        raise RuntimeError(
            "_generate_and_score_completions was called again for a batch that is prepared already. A second call "
            "would sample in the training process and train without importance weights. To replace groups, set "
            "drop_zero_variance_groups=True, or pass an on_group function that returns a Rejection."
        )


def check_preparation(
    name: str, batch: dict[str, torch.Tensor], rows: list[Row], *, pad_token_id: int, sampled: bool, scored: bool
) -> None:
    """Raise `RuntimeError` unless the batch that TRL has prepared is that of the engine.

    Args:
        name: of the trainer's class.
        batch: what TRL has prepared.
        rows: what was taken for it.
        pad_token_id: what fills up a row.
        sampled, scored: whether TRL has asked for the completions and for the rewards of `rows`.
    """
    if not sampled:
        raise RuntimeError(
            f"{name} samples completions itself: its _generate or _generate_single_turn does not call super(), which "
            "gives TRL the completions of the engine. Pass an engine of your own as A3POConfig(engine=...)."
        )
    if not scored:
        raise RuntimeError(
            f"{name}._calculate_rewards does not call super(), which gives TRL the rewards that the reward functions "
            "have returned in the background. Change the result of super()._calculate_rewards(...), or do the work "
            "in reward_funcs or on_group."
        )
    completion_ids = batch["completion_ids"].cpu().long()
    tokens = [list(rollout.token_ids) for rollout in rollouts_of(rows)]
    padded = torch.full((len(tokens), max(map(len, tokens))), pad_token_id)
    for row, ids in enumerate(tokens):
        padded[row, : len(ids)] = torch.tensor(ids)
    width = padded.shape[1]  # TRL may pad further
    if not (torch.equal(completion_ids[:, :width], padded) and (completion_ids[:, width:] == pad_token_id).all()):
        raise RuntimeError(
            f"{name} changed the completions of the engine, whose log-probs would belong to other tokens: change them "
            "in on_group, which returns rollouts with their log-probs and versions."
        )


def check_begun(name: str, rows: object) -> None:
    """Raise `RuntimeError` if training has begun past `A3POTrainer.train`, which makes `rows`."""
    if rows is None:
        raise RuntimeError(
            f"{name}.train does not call super().train(), which prepares the run and ends it: call it, and do what is "
            "to be done before or after it."
        )


def check_in_step(name: str, in_step: bool) -> None:
    """Raise `RuntimeError` if a micro-step is prepared for a `training_step` that is not A3POTrainer's."""
    if not in_step:
        raise RuntimeError(
            f"{name}.training_step does not call super().training_step(), which checks that what was trained is "
            "the batch of the engine: call it, and change the loss in compute_loss."
        )


def check_prepared(name: str, prepared: bool) -> None:
    """Raise `RuntimeError` if a micro-step was trained on other inputs than those of the queue."""
    if not prepared:
        raise RuntimeError(
            f"{name}._prepare_inputs does not call super(), which takes the batches of the engine: call it, and "
            "change what it returns."
        )


def check_own_loss(name: str, read: set[str], staleness: torch.Tensor) -> None:
    """Raise `ValueError` for a loss of the user's own that does not look at the policy that sampled the tokens.

    Args:
        name: of the trainer's class.
        read: names of what the loss has read of its inputs.
        staleness: of the tokens, `(B, T)`.
    """
    oldest = int(staleness.max())
    if oldest > 0 and not read & {"old_per_token_logps", "sampling_per_token_logps"}:
        raise ValueError(
            f"The loss of {name} reads neither inputs['old_per_token_logps'] nor inputs['sampling_per_token_logps'], "
            f"so tokens that are {oldest} steps stale would be trained without a correction: use "
            "inputs['old_per_token_logps'], the log-probs of the policy that sampled the tokens, or call "
            "super()._compute_loss, or set max_staleness=0."
        )
