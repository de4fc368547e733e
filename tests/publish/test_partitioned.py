"""Buckets: in order, each name once, none larger than allowed but a single weight that is."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.protocol.weights import GatheredTensors
from trl_a3po.publish.partitioned import buckets


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 60))
def test_buckets_hold_every_name_once_in_order_and_no_more_than_allowed(sizes, most):
    named = {f"w{i}": size for i, size in enumerate(sizes)}
    runs = buckets(named, most)
    assert [name for run in runs for name in run] == list(named)
    for run in runs:
        assert sum(named[name] for name in run) <= most or len(run) == 1
    for one, following in itertools.pairwise(runs):  # none was closed too early
        assert sum(named[name] for name in one) + named[following[0]] > most


def test_a_gathered_tensor_exists_only_while_it_is_at_turn():
    open_now: list[list[str]] = []

    class Gathering:
        def __init__(self, names):
            self.names = list(names)

        def __enter__(self):
            open_now.append(self.names)
            return {name: name.upper() for name in self.names}

        def __exit__(self, *error):
            open_now.remove(self.names)

    tensors = GatheredTensors({"a": None, "b": None, "c": None}, [["a", "b"], ["c"]], Gathering)
    seen = [(name, tensor, list(open_now)) for name, tensor in tensors.items()]
    assert seen == [("a", "A", [["a", "b"]]), ("b", "B", [["a", "b"]]), ("c", "C", [["c"]])]
    assert open_now == [] and list(tensors) == ["a", "b", "c"] and len(tensors) == 3 and "b" in tensors
