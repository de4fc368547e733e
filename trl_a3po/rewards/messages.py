"""What travels between the training process and its reward workers: functions and groups there, scores back.

Guarantees: what cannot be sent is named, with what to do about it, before or instead of a score.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Group, Score


def pickled_functions(funcs: Sequence[Callable[..., Any] | None], names: Sequence[str]) -> bytes:
    """The functions as reward workers get them: together, so that what they share stays shared.

    Raises:
        RewardError: one cannot be pickled.
    """
    try:
        return cloudpickle.dumps(list(funcs))
    except Exception as error:
        for func, name in zip(funcs, names, strict=True):
            try:
                cloudpickle.dumps(func)
            except Exception as reason:
                raise RewardError(
                    f"The reward function '{name}' cannot be sent to a reward worker: {reason!r}. Create what cannot "
                    "be pickled inside the function, or set reward_workers=0, which runs it in this process."
                ) from reason
        raise RewardError(
            f"The reward functions cannot be sent to a reward worker: {error!r}. Set reward_workers=0, which runs "
            "them in this process."
        ) from error


def pickled_group(group: Group, completions: list[Any], state: Any) -> bytes:
    """A group with what its reward functions get beside it.

    Raises:
        RewardError: it cannot be pickled.
    """
    try:
        return cloudpickle.dumps((group, completions, state))
    except Exception as error:
        raise RewardError(
            f"Prompt {group.prompt.index} cannot be sent to a reward worker: {error!r}. Keep plain values in the "
            "dataset's columns, or set reward_workers=0."
        ) from error


def pickled_score(score: Score) -> bytes:
    """A worker's answer.

    Raises:
        RewardError: it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(score)
    except Exception as error:
        columns = ", ".join(map(repr, score.extra_columns))
        raise RewardError(
            f"What log_extra recorded ({columns}) cannot be sent back from a reward worker: {error!r}. Record "
            "numbers or text, or set reward_workers=0."
        ) from error


def unpickled_score(score: bytes, group: Group) -> Score:
    """A worker's answer about `group`.

    Raises:
        RewardError: it cannot be loaded here.
    """
    try:
        return pickle.loads(score)
    except Exception as error:
        raise RewardError(
            f"What log_extra recorded for prompt {group.prompt.index} cannot be loaded in the training process: "
            f"{error!r}. Record numbers or text, or set reward_workers=0."
        ) from error
