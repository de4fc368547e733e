"""Which rows of a generation batch are together in a micro-batch.

Guarantees: rows move only between the micro-batches of one optimizer step, and only where the loss is a sum over rows,
so gradients stay the same; every micro-batch keeps its number of rows; completions of one prompt are together as far
as the sizes allow, and long and short rows are spread evenly.
"""

from collections.abc import Sequence
from itertools import chain

from trl import GRPOConfig

from trl_a3po.distributed.balance import balanced_partition


def micro_batch_order(costs: Sequence[float], groups: Sequence[Sequence[int]], rows_per_micro_batch: int) -> list[int]:
    """Order the rows so that each consecutive `rows_per_micro_batch` of them are a micro-batch.

    Args:
        costs: cost of each row.
        groups: the rows of each prompt; each row once.
    """
    size = len(groups[0])
    ordered = groups
    if all(len(rows) == size for rows in groups):
        if rows_per_micro_batch % size == 0 and len(costs) % rows_per_micro_batch == 0:
            ordered = _balance_groups(costs, groups, len(costs) // rows_per_micro_batch)
        elif size % rows_per_micro_batch == 0:
            ordered = [_balance_rows(costs, rows, size // rows_per_micro_batch) for rows in groups]
    return list(chain.from_iterable(ordered))


def _balance_groups(
    costs: Sequence[float], groups: Sequence[Sequence[int]], micro_batches: int
) -> list[Sequence[int]]:
    parts = balanced_partition([sum(costs[row] for row in rows) for rows in groups], micro_batches)
    return [groups[group] for group in chain.from_iterable(parts)]


def _balance_rows(costs: Sequence[float], rows: Sequence[int], micro_batches: int) -> list[int]:
    parts = balanced_partition([costs[row] for row in rows], micro_batches)
    return [rows[i] for i in chain.from_iterable(parts)]


def micro_batches_per_step(steps_per_generation: int, accumulation: int) -> int:
    """How many consecutive micro-batches of a generation batch certainly belong to one optimizer step."""
    if steps_per_generation % accumulation == 0:
        return accumulation
    return steps_per_generation if accumulation % steps_per_generation == 0 else 1


def is_sum_over_rows(args: GRPOConfig) -> bool:
    """Whether the gradient of an optimizer step is independent of which rows are together in a micro-batch."""
    # Each of the other settings takes a mean or a quantile over the tokens of a micro-batch.
    return (
        args.loss_type != "bnpo"
        and args.top_entropy_quantile == 1.0
        and not args.entropy_coef
        and not args.use_adaptive_entropy
    )
