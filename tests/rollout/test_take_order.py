from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.rollout.take_order import choose_batch
from trl_a3po.rollout.take_plan import TakePlan


def choose(ready, submitted, *, batch=2, bound=1, next_take=0, takes_end=100):
    plan = TakePlan(batch, bound, lambda take: take, 100)
    return choose_batch(ready, submitted, plan=plan, next_take=next_take, takes_end=takes_end)


def test_ready_groups_are_taken_in_submission_order():
    assert choose([True, True, True], [0, 0, 0]).positions == (0, 1)


def test_too_few_ready_groups_are_counted():
    assert choose([False, True, False], [0, 0, 0]).missing == 1


def test_an_unfinished_group_is_overtaken_while_the_next_take_is_in_its_bound():
    assert choose([False, True, True], [0, 0, 0]).positions == (1, 2)


def test_an_unfinished_group_at_its_deadline_is_waited_for():
    choice = choose([False, True, True], [0, 0, 0], bound=0)
    assert (choice.positions, choice.deadline) == ((), 0)


def test_the_place_behind_other_overtaken_groups_decides():
    unfinished = [False, False, False, True, True]
    assert choose(unfinished, [0] * 5, bound=2).positions == (3, 4)
    assert choose(unfinished, [0] * 5, bound=1).deadline == 2


def test_an_unfinished_group_is_not_put_off_to_a_take_that_never_comes():
    assert choose([False, True, True], [0, 0, 0], bound=9, takes_end=1).deadline == 0


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_a_batch_is_handed_out_whenever_any_batch_keeps_every_deadline(groups, batch, bound):
    """The oracle tries every set of B ready groups; only unfinished groups have a deadline to break."""
    ready, submitted = [done for done, _ in groups], [version for _, version in groups]

    def keeps_deadlines(chosen):
        rest = [position for position in range(len(groups)) if position not in chosen]
        return all(
            ready[position] or position > max(chosen) or 1 + place // batch <= submitted[position] + bound
            for place, position in enumerate(rest)
        )

    candidates = combinations([position for position, done in enumerate(ready) if done], batch)
    possible = any(keeps_deadlines(chosen) for chosen in candidates)
    positions = choose(ready, submitted, batch=batch, bound=bound).positions
    assert bool(positions) == possible
    assert not positions or keeps_deadlines(positions)
