"""Which process trains on which rows: pure functions, the same answer in every process.

Guarantees: every process gets equally many rows; the rows of a group stay neighbours, so that TRL's reshaping of the
gathered rewards to `(groups, num_generations)` still finds its groups; the costliest share is as small as a greedy
deal and a few exchanges make it.
"""

from collections.abc import Sequence

from trl_a3po.distributed.balance import deal_hands
from trl_a3po.protocol.records import Group
from trl_a3po.rollout.batch_rows import Row


def row_cost(tokens: int, hidden_size: int) -> float:
    """What a sequence costs a transformer, in units of one token's matrix products: those grow with its length, causal
    attention with the square of it. Per layer and token the first take 24·h² operations and the second 2·L·h (h the
    hidden size, L the length), so attention adds `L / (12·h)`."""
    return tokens * (1 + tokens / (12 * hidden_size))


def deal(costs: Sequence[Sequence[float]], processes: int) -> list[tuple[int, int]]:
    """The order of a batch's rows in which process r trains on the r-th of `processes` equal stretches.

    Where a stretch holds whole groups, whole groups are dealt, the costliest first, each to the process with the
    least so far, and then exchanged while that helps; where a group fills several stretches, its rows are. Where
    stretches cut groups in two, nothing is moved.

    Args:
        costs: of each group's rollouts, all groups of one size.
        processes: divides the number of rows.

    Returns:
        `(group, rollout)` pairs, each once.
    """
    size = len(costs[0])
    share, rest = divmod(len(costs) * size, processes)
    if rest:
        raise ValueError(f"{len(costs) * size} rows cannot be dealt equally to {processes} processes.")
    if share % size == 0:
        totals = [sum(group) for group in costs]
        shares = deal_hands(totals, processes)
        return [(group, row) for groups in shares for group in groups for row in range(size)]
    if size % share == 0:
        order = []
        for group, rows in enumerate(costs):
            order += [(group, row) for part in deal_hands(rows, size // share) for row in part]
        return order
    return [(group, row) for group in range(len(costs)) for row in range(size)]


def dealt_rows(groups: Sequence[Group], processes: int, hidden_size: int) -> list[Row]:
    """The rows of a batch in the order of `deal`; with one process, group by group."""
    if processes == 1:
        return [(group, number) for group in groups for number in range(len(group.rollouts))]
    costs = [
        [row_cost(len(group.prompt.token_ids) + len(rollout.token_ids), hidden_size) for rollout in group.rollouts]
        for group in groups
    ]
    return [(groups[group], number) for group, number in deal(costs, processes)]


def share_of(rows: Sequence, rank: int, processes: int) -> list:
    """The rank's stretch of `rows`."""
    share = len(rows) // processes
    return list(rows[rank * share : (rank + 1) * share])


def imbalance(costs: Sequence[float], processes: int) -> float:
    """Cost of the costliest stretch over the mean: 1 where all wait for none."""
    totals = [sum(share_of(costs, rank, processes)) for rank in range(processes)]
    return max(totals) * processes / sum(totals)
