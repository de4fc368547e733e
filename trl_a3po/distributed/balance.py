"""Things of unequal cost in parts of equal number: pure, the same answer wherever it is asked.

Guarantees: every thing is dealt once; parts differ in cost by as little as a greedy deal and a few exchanges make it.
"""

from collections.abc import Sequence

_SWAPS = 32


def deal_hands(costs: Sequence[float], hands: int) -> list[list[int]]:
    """Numbers `0..len(costs)-1` in `hands` lists of equal length; within a list they keep their order.

    Dealt the costliest first, each to the hand with the least so far, and then exchanged while that helps.

    Args:
        costs: one for each number; `hands` divides their number.
    """
    capacity = len(costs) // hands
    dealt: list[list[int]] = [[] for _ in range(hands)]
    totals = [0.0] * hands
    for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
        open_hands = [hand for hand in range(hands) if len(dealt[hand]) < capacity]
        cheapest = min(open_hands, key=lambda hand: totals[hand])
        dealt[cheapest].append(number)
        totals[cheapest] += costs[number]
    for _ in range(_SWAPS):
        if not _swap(dealt, totals, costs):
            break
    return [sorted(hand) for hand in dealt]


def _swap(dealt: list[list[int]], totals: list[float], costs: Sequence[float]) -> bool:
    """Exchange one number of the costliest hand for one of another, so that the costlier of the two gets as cheap as
    possible; whether that helped. Equal lengths leave a greedy deal more to gain than it has without them."""
    most = max(range(len(dealt)), key=totals.__getitem__)
    best, swap = totals[most], None
    for other in range(len(dealt)):
        for i, mine in enumerate(dealt[most]):
            for j, theirs in enumerate(dealt[other]) if other != most else ():
                less = costs[mine] - costs[theirs]
                after = max(totals[most] - less, totals[other] + less)
                if after < best * (1 - 1e-9):
                    best, swap = after, (other, i, j, less)
    if swap is None:
        return False
    other, i, j, less = swap
    dealt[most][i], dealt[other][j] = dealt[other][j], dealt[most][i]
    totals[most] -= less
    totals[other] += less
    return True
