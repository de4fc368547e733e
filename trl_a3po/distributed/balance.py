"""Split items of unequal cost into parts that hold equally many items and cost about the same.

Guarantees: every item is in exactly one part; the result depends on the arguments alone, so that every process
computes the same partition. The partition is a heuristic: greedy assignment, then pairwise swaps.
"""

from collections.abc import Sequence

_MAX_SWAPS = 32


def balanced_partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split the items `0..len(costs)-1` into `num_parts` lists of equal length, each in ascending order.

    Items are assigned from the costliest to the cheapest, each to the part with the lowest total that still has room.
    Then items are swapped between the costliest part and another one as long as that lowers the larger total.

    Args:
        costs: cost of each item; `num_parts` must divide their number.
    """
    capacity = len(costs) // num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0.0] * num_parts
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        with_room = [part for part in range(num_parts) if len(parts[part]) < capacity]
        cheapest = min(with_room, key=lambda part: totals[part])
        parts[cheapest].append(item)
        totals[cheapest] += costs[item]
    for _ in range(_MAX_SWAPS):
        if not _swap_once(parts, totals, costs):
            break
    return [sorted(part) for part in parts]


def _swap_once(parts: list[list[int]], totals: list[float], costs: Sequence[float]) -> bool:
    """Make the swap between the costliest part and another one that lowers the larger of their totals most, in place.
    Returns whether there was one. A greedy assignment to parts of equal length leaves such swaps."""
    costliest = max(range(len(parts)), key=totals.__getitem__)
    lowest, best = totals[costliest], None
    for other in range(len(parts)):
        if other == costliest:
            continue
        for i, given in enumerate(parts[costliest]):
            for j, taken in enumerate(parts[other]):
                saving = costs[given] - costs[taken]
                larger = max(totals[costliest] - saving, totals[other] + saving)
                if larger < lowest * (1 - 1e-9):
                    lowest, best = larger, (other, i, j, saving)
    if best is None:
        return False
    other, i, j, saving = best
    parts[costliest][i], parts[other][j] = parts[other][j], parts[costliest][i]
    totals[costliest] -= saving
    totals[other] += saving
    return True
