"""What the training process and its reward workers send each other: functions and groups there, scores back.

Guarantees: the error about an object that cannot be sent names it and says what to do.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from trl_a3po.errors import RewardError
from trl_a3po.protocol.records import Group, Score

IN_THIS_PROCESS = "set reward_workers=0, which runs the function in this process"


def pickled_functions(
    funcs: Sequence[Callable[..., Any] | None], names: Sequence[str], otherwise: str = IN_THIS_PROCESS
) -> bytes:
    """The functions, pickled together, so that an object that two of them share is still shared in the worker.

    Args:
        funcs: the functions; `None` stands for a column that is computed elsewhere.
        names: one name per function.
        otherwise: for messages, what else to do about a function that cannot be pickled.

    Raises:
        RewardError: a function cannot be pickled.
    """
    try:
        return _dumps(list(funcs))
    except Exception as error:
        for func, name in zip(funcs, names, strict=True):
            try:
                _dumps(func)
            except Exception as reason:
                raise RewardError(
                    f"The reward function '{name}' cannot be sent to a reward worker: {reason!r}. Create the object "
                    f"that cannot be pickled inside the function, or {otherwise}."
                ) from reason
        raise RewardError(
            f"The reward functions cannot be sent to a reward worker: {error!r}. To avoid it, {otherwise}."
        ) from error


def pickled_group(group: Group, completions: list[Any], state: Any) -> bytes:
    """A group, its completions, and the trainer's state that its reward functions receive, without its log.

    Raises:
        RewardError: the group cannot be pickled.
    """
    try:
        return _dumps((group, completions, state))
    except Exception as error:
        raise RewardError(
            f"Prompt {group.prompt.index} cannot be sent to a reward worker: {error!r}. Keep plain values in the "
            "dataset's columns, or set reward_workers=0."
        ) from error


def pickled_log(kept: int, entries: list[dict[str, Any]]) -> bytes:
    """An addition to the log of a worker.

    Raises:
        RewardError: an entry cannot be pickled.
    """
    try:
        return _dumps((kept, entries))
    except Exception as error:
        raise RewardError(
            f"The trainer's log_history cannot be sent to a reward worker: {error!r}. Log plain values, or set "
            "reward_workers=0."
        ) from error


def pickled_score(score: Score) -> bytes:
    """The score that a worker sends back.

    Raises:
        RewardError: the score cannot be pickled.
    """
    try:
        return _dumps(score)
    except Exception as error:
        columns = ", ".join(map(repr, score.extra_columns))
        raise RewardError(
            f"The values that log_extra recorded ({columns}) cannot be sent back from a reward worker: {error!r}. "
            "Record numbers or strings, or set reward_workers=0."
        ) from error


def unpickled_score(score: bytes, group: Group) -> Score:
    """The score of `group` that a worker has sent.

    Raises:
        RewardError: the score cannot be loaded in this process.
    """
    try:
        loaded: Score = pickle.loads(score)
    except Exception as error:
        raise RewardError(
            f"The values that log_extra recorded for prompt {group.prompt.index} cannot be loaded in the training "
            f"process: {error!r}. Record numbers or strings, or set reward_workers=0."
        ) from error
    return loaded


def _dumps(value: object) -> bytes:
    pickled: bytes = cloudpickle.dumps(value)
    return pickled
