"""Which groups a take hands out: submission order, with a deadline.

Guarantees: the groups handed out are the first B ready ones in submission order; an unfinished group is overtaken
only if, at the place this leaves it, it can still be trained within `max_staleness`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_a3po.rollout.take_plan import TakePlan


@dataclass(frozen=True, slots=True)
class Choice:
    """What a take may hand out now.

    Args:
        positions: positions of the B groups, ascending; empty if the take has to wait.
        missing: ready groups short of B.
        deadline: position of the unfinished group that may not be overtaken, `None` if there is none.
    """

    positions: tuple[int, ...] = ()
    missing: int = 0
    deadline: int | None = None


def choose_batch(
    ready: Sequence[bool], submitted_versions: Sequence[int], *, plan: TakePlan, next_take: int, takes_end: int
) -> Choice:
    """Choose the batch of take number `next_take`.

    The first B ready groups are the best choice: any other B ready groups put at most as many in front of every
    unfinished group, so leave each of them at the same place or further back; if these break a deadline, all do.

    Args:
        ready: for each group waiting to be taken, in submission order, whether it is finished and scored.
        submitted_versions: for each of them, the published version when its attempt was submitted.
        plan: the versions of the takes and the bound.
        next_take: number of this take.
        takes_end: takes from this number on cannot happen (the run or its prompts end): an unfinished group is not
            put off to one of them.
    """
    batch = [position for position, is_ready in enumerate(ready) if is_ready][: plan.groups_per_batch]
    if len(batch) < plan.groups_per_batch:
        return Choice(missing=plan.groups_per_batch - len(batch))
    overtaken = [position for position in range(batch[-1]) if not ready[position]]
    for place, position in enumerate(overtaken):  # all that stays in front of it is unfinished and overtaken too
        take = plan.expected_take(next_take + 1, place)
        if take >= takes_end or not plan.in_bound(take, submitted_versions[position]):
            return Choice(deadline=position)
    return Choice(positions=tuple(batch))
