"""Which process trains on which rows of a generation batch: pure functions, with the same result in every process.

Guarantees: every process gets equally many rows; the rows of a group stay neighbours, because TRL reshapes the
gathered rewards to `(groups, num_generations)`; the shares cost about the same (`distributed/balance.py`).
"""

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from trl_a3po.distributed.balance import balanced_partition
from trl_a3po.protocol.records import Group
from trl_a3po.rollout.batch_rows import Row, prompt_ids_of

Item = TypeVar("Item")


def row_cost(tokens: int, hidden_size: int) -> float:
    """Cost of a sequence in a transformer, in units of the matrix products of one token.

    Those products grow with the length L of the sequence, causal attention with its square. For each layer and token
    the products take 24·h² operations and attention 2·L·h, with h the hidden size, so attention adds `L / (12·h)`.
    """
    return tokens * (1 + tokens / (12 * hidden_size))


def balanced_order(costs: Sequence[Sequence[float]], processes: int) -> list[tuple[int, int]]:
    """Order the rows of a batch so that process r trains on the r-th of `processes` equal stretches.

    Where a stretch holds whole groups, whole groups are balanced over the stretches. Where a group fills several
    stretches, its rows are balanced over them. Where stretches would cut groups in two, the order stays as it is.

    Args:
        costs: cost of each rollout, by group; all groups have the same size.
        processes: must divide the number of rows.

    Returns:
        `(group, rollout)` pairs, each once.
    """
    size = len(costs[0])
    share, rest = divmod(len(costs) * size, processes)
    if rest:
        raise ValueError(f"{len(costs) * size} rows cannot be split equally over {processes} processes.")
    groups: Sequence[int] = range(len(costs))
    rows_of = [list(range(size)) for _ in costs]
    if share % size == 0:
        groups = list(chain.from_iterable(balanced_partition([sum(rows) for rows in costs], processes)))
    elif size % share == 0:
        rows_of = [list(chain.from_iterable(balanced_partition(rows, size // share))) for rows in costs]
    return [(group, row) for group in groups for row in rows_of[group]]


def balanced_rows(groups: Sequence[Group], processes: int, hidden_size: int) -> list[Row]:
    """The rows of a batch in `balanced_order`; in a run of one process, group by group."""
    if processes == 1:
        return [(group, number) for group in groups for number in range(len(group.rollouts))]
    costs = [
        [
            row_cost(len(prompt_ids_of((group, number))) + len(rollout.token_ids), hidden_size)
            for number, rollout in enumerate(group.rollouts)
        ]
        for group in groups
    ]
    return [(groups[group], number) for group, number in balanced_order(costs, processes)]


def rank_share(rows: Sequence[Item], rank: int, processes: int) -> list[Item]:
    """The stretch of `rows` that process `rank` trains on."""
    share = len(rows) // processes
    return list(rows[rank * share : (rank + 1) * share])


def imbalance(costs: Sequence[float], processes: int) -> float:
    """Cost of the costliest share over the mean cost of a share: 1 where no process waits for another."""
    totals = [sum(rank_share(costs, rank, processes)) for rank in range(processes)]
    return max(totals) * processes / sum(totals)
