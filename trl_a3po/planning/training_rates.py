"""What training takes in finished runs: for each token, each micro-step and each optimizer step.

Guarantees: pure; no rate is negative; the rates give the mean time of the takes, also of each run where there are no
more runs than rates; what the runs cannot tell apart is said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

LEAST_DIFFERENCE = 0.01  # in the tokens of two takes, as a share of the mean, for their slope to count
LEAST_SHARE = 0.1  # of the time of training that is taken to follow the number of tokens
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class TrainedTake:
    """The training of a take.

    Args:
        tokens: completion tokens that one process trained on, each as often as `num_iterations` says.
        micro_steps: of one process.
        optimizer_steps: that ended meanwhile.
        seconds: without waiting, publishing and evaluations.
    """

    tokens: float
    micro_steps: int
    optimizer_steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainingRates:
    """
    Args:
        token, micro_step, optimizer_step: seconds of each.
        told_apart: what a micro-step takes was measured apart from what an optimizer step takes, because the runs
            have different numbers of micro-steps.
    """

    token: float
    micro_step: float
    optimizer_step: float
    told_apart: bool


def training_rates(runs: Sequence[Sequence[TrainedTake]]) -> TrainingRates:
    """The rates of one training process, from the takes of each run.

    The time of a token is the median of the slopes between two takes of one kind (Theil and Sen), so that one slow
    step does not decide it. The other rates follow from the mean times of the kinds. Where the runs do not tell two
    rates apart, the time belongs to the tokens before the micro-steps, and to these before the optimizer steps.
    """
    kinds = [kind for takes in runs for kind in _kinds(takes)]
    means, counts = np.array([kind.mean(axis=0) for kind in kinds]), np.array([len(kind) for kind in kinds])
    columns, seconds = means[:, :3], means[:, 3]
    per_token = float(counts @ seconds / (counts @ columns[:, 0]))
    slope = _slope(kinds)
    if slope is None:
        used = _independent(columns, [0, 1, 2])
        token, micro_step, optimizer_step = _least_squares(columns, seconds, seconds, counts, used)
    else:
        used = _independent(columns, [1, 2])
        token = float(np.clip(slope, LEAST_SHARE * per_token, per_token))
        rest = seconds - token * columns[:, 0]
        _, micro_step, optimizer_step = _least_squares(columns, rest, seconds, counts, used)
    return TrainingRates(max(token, LEAST_SHARE * per_token), micro_step, optimizer_step, {1, 2} <= set(used))


def _kinds(takes: Sequence[TrainedTake]) -> Iterator[Array]:
    """The takes as rows, those with the same number of optimizer steps together."""
    for steps in sorted({take.optimizer_steps for take in takes}):
        same = [take for take in takes if take.optimizer_steps == steps]
        yield np.array([(take.tokens, take.micro_steps, take.optimizer_steps, take.seconds) for take in same])


def _slope(kinds: Sequence[Array]) -> float | None:
    """Seconds of a token; `None` where all takes of a kind have the same number of tokens."""
    slopes = []
    for kind in kinds:
        tokens, seconds = kind[:, 0], kind[:, 3]
        first, second = np.triu_indices(len(kind), 1)
        apart = np.abs(tokens[first] - tokens[second]) > LEAST_DIFFERENCE * tokens.mean()
        slopes.append((seconds[first] - seconds[second])[apart] / (tokens[first] - tokens[second])[apart])
    every = np.concatenate(slopes)
    return float(np.median(every)) if len(every) else None


def _independent(columns: Array, order: Sequence[int]) -> list[int]:
    """The first of these columns that are no combination of those before them."""
    used: list[int] = []
    scaled = columns / np.maximum(columns.max(axis=0), ROUNDING)
    for column in order:
        values = np.linalg.svd(scaled[:, [*used, column]], compute_uv=False)
        if len(values) > len(used) and values[-1] > LEAST_DIFFERENCE * values[0]:
            used.append(column)
    return used


def _least_squares(
    columns: Array, seconds: Array, whole: Array, counts: Array, used: Sequence[int]
) -> tuple[float, float, float]:
    """The three rates whose sum is nearest to `seconds`, 0 where a column is not used, none below 0. The error of a
    kind counts as a share of its `whole` time, as often as the kind has takes."""
    weights = np.sqrt(counts) / whole
    best, least = [0.0, 0.0, 0.0], float("inf")
    for size in range(len(used), 0, -1):
        for chosen in combinations(used, size):
            rates = np.linalg.lstsq(columns[:, chosen] * weights[:, None], seconds * weights, rcond=None)[0]
            error = float((((columns[:, chosen] @ rates - seconds) * weights) ** 2).sum())
            if (rates >= 0).all() and error < least - ROUNDING:
                best, least = [0.0, 0.0, 0.0], error
                for column, rate in zip(chosen, rates, strict=True):
                    best[column] = float(rate)
    return best[0], best[1], best[2]
