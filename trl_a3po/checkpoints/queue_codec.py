"""The state of a queue as JSON and tensors, and back.

Guarantees: `decode_state(*encode_state(state))` equals `state`, to the last bit of every log-prob and reward. What
`log_extra` recorded, and what an episode holds, becomes text where JSON has no value for it, such as for a `Decimal`.
The images of an episode are saved too (`saved_images.py`); the decoded state has their places.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import numpy as np
import torch

from trl_a3po.checkpoints.saved_images import PLACE, SavedImages
from trl_a3po.protocol.images import PromptImages, is_image
from trl_a3po.protocol.records import EpisodeRecord, Rollout, Score
from trl_a3po.rollout.outcomes import Outcomes
from trl_a3po.rollout.queue_state import OutstandingState, QueueState


def encode_state(state: QueueState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`(JSON values, tensors)`. The numbers of each token and of each rollout are in the tensors, in the order of
    `outstanding`.

    The tensors are `token_ids`, `logps` (float64) and `versions`, with one entry per token; `lengths`, with the number
    of tokens of each rollout; `rewards`, with one row per scored rollout and one column per reward function, NaN where
    a function returned `None`; and those of `SavedImages`.
    """
    images = SavedImages()
    rollouts = [rollout for item in state.outstanding for rollout in item.rollouts or ()]
    rewards = [row for item in state.outstanding if item.score is not None for row in item.score.rewards]
    tensors = {
        "token_ids": _joined((rollout.token_ids for rollout in rollouts), torch.int64),
        "logps": _joined((rollout.logps for rollout in rollouts), torch.float64),
        "versions": _joined((rollout.versions for rollout in rollouts), torch.int64),
        "lengths": torch.tensor([len(rollout.token_ids) for rollout in rollouts], dtype=torch.int64),
        "rewards": torch.tensor(rewards, dtype=torch.float64).view(len(rewards), -1 if rewards else 0),
    }
    values = {name: getattr(state, name) for name in SCALARS}
    values["outcomes"], values["left_out"] = asdict(state.outcomes), state.left_out
    values["outstanding"] = [_encode_item(item, images) for item in state.outstanding]
    return values, tensors | images.tensors()


def decode_state(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> QueueState:
    """The state that `encode_state` has encoded.

    Raises:
        ValueError: the tensors do not have as many numbers as the values need, or other dtypes.
    """
    lengths = tensors["lengths"].tolist()
    _check_tensors(values, tensors, lengths)
    bounds = pairwise(accumulate(lengths, initial=0))
    columns = [tensors[name].tolist() for name in ("token_ids", "logps", "versions")]
    rollout_columns = ([column[start:end] for column in columns] for start, end in bounds)
    rewards = iter(tensors["rewards"].tolist())
    return QueueState(
        **{name: values[name] for name in SCALARS},
        outcomes=Outcomes(**values["outcomes"]),
        left_out=values.get("left_out", {}),  # which earlier versions did not count
        outstanding=[_decode_item(item, rollout_columns, rewards) for item in values["outstanding"]],
    )


SCALARS = ("next_take", "cursor", "published_version", "last_taken_version", "rejected_in_a_row")
ITEM_SCALARS = ("prompt_index", "prompt_ids", "submitted_version", "attempt", "prompt_digest")


def _check_tensors(values: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> None:
    finished = [item for item in values["outstanding"] if item["finish_reasons"] is not None]
    scored = sum(len(item["finish_reasons"]) for item in finished if item["score"] is not None)
    dtypes = {"token_ids": torch.int64, "logps": torch.float64, "versions": torch.int64, "lengths": torch.int64}
    sizes = {name: tuple(tensors[name].shape) for name in dtypes}
    if any(tensors[name].dtype != dtype for name, dtype in dtypes.items()) or min(lengths, default=0) < 0:
        raise ValueError("a tensor of the groups has another dtype, or a rollout a negative length")
    if {sizes["token_ids"], sizes["logps"], sizes["versions"]} != {(sum(lengths),)}:
        raise ValueError(f"the tensors of the groups have the sizes {sizes}, which do not go together")
    if sum(len(item["finish_reasons"]) for item in finished) != len(lengths) or len(tensors["rewards"]) != scored:
        raise ValueError(f"there are {len(lengths)} rollouts, and {len(tensors['rewards'])} rows of rewards")


def _joined(lists: Iterable[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of all lists, one list after the other, `(N,)`."""
    return torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)


def _encode_item(item: OutstandingState, images: SavedImages) -> dict[str, Any]:
    values = {name: getattr(item, name) for name in ITEM_SCALARS}
    values["failures"] = item.failures
    values["finish_reasons"] = None if item.rollouts is None else [rollout.finish_reason for rollout in item.rollouts]
    values["episodes"] = item.rollouts and [_encode_episode(rollout, images) for rollout in item.rollouts]
    score = item.score
    values["score"] = score and {
        "extra_columns": {name: [_as_json(v) for v in values] for name, values in score.extra_columns.items()},
        "metrics": score.metrics,
        "seconds": score.seconds,
    }
    return values


def _encode_episode(rollout: Rollout, images: SavedImages) -> dict[str, Any] | None:
    episode = rollout.episode
    if episode is None:
        return None
    values = {field.name: getattr(episode, field.name) for field in fields(episode)}
    if isinstance(shown := values["images"], PromptImages):
        values["images"] = [images.place(image) for image in shown.images]
    return {name: _as_json(value, images) for name, value in values.items()}


def _as_json(value: Any, images: SavedImages | None = None) -> Any:
    """`value` with text in place of everything that JSON does not know; numbers of numpy and torch stay numbers. With
    `images`, which collects them, places stand for images."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_as_json(item, images) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _as_json(item, images) for key, item in value.items()}
    if images is not None and is_image(value):
        return {PLACE: images.place(value)}
    return _as_json(value.tolist()) if isinstance(value, (np.generic, np.ndarray, torch.Tensor)) else str(value)


def _decode_item(
    values: dict[str, Any], columns: Iterator[list[Any]], rewards: Iterator[list[float]]
) -> OutstandingState:
    values = dict(values)
    reasons, episodes, saved_score = (values.pop(name) for name in ("finish_reasons", "episodes", "score"))
    if reasons is None:
        return OutstandingState(**values)
    rollouts = [
        _decode_rollout(next(columns), reason, episode) for reason, episode in zip(reasons, episodes, strict=True)
    ]
    score = None
    if saved_score is not None:
        metrics = [(name, value) for name, value in saved_score["metrics"]]
        scored = [next(rewards) for _ in rollouts]
        score = Score(scored, saved_score["extra_columns"], metrics, saved_score["seconds"])
    return OutstandingState(**values, rollouts=rollouts, score=score)


def _decode_rollout(
    columns: list[Any], finish_reason: Literal["stop", "length"], episode: dict[str, Any] | None
) -> Rollout:
    token_ids, logps, versions = columns
    return Rollout(token_ids, logps, versions, finish_reason, None if episode is None else EpisodeRecord(**episode))
