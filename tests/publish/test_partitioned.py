"""Buckets: in order, each name once, none larger than allowed but a single weight that is. The parts that processes
hold of a weight: each element once."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_a3po.models import sharded
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


@pytest.mark.parametrize(("elements", "processes"), [(6, 2), (7, 3), (2, 5), (1, 1)])
def test_the_parts_of_a_partitioned_weight_are_its_elements_without_filling(monkeypatch, elements, processes):
    """DeepSpeed fills the last parts with whatever lay in memory."""
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(sharded, "is_deepspeed_zero3_enabled", lambda: True)
    whole, size = torch.arange(elements, dtype=torch.float32), -(-elements // processes)
    filled = torch.cat([whole, torch.full((size * processes - elements,), float("nan"))])
    parts = []
    for rank in range(processes):
        weight = torch.nn.Parameter(torch.empty(0))
        weight.ds_id, weight.ds_numel, weight.ds_process_group = 0, elements, None
        weight.ds_tensor = filled[rank * size : (rank + 1) * size]
        weight.ds_tensor.ds_numel = size
        monkeypatch.setattr(sharded.dist, "get_rank", lambda group, rank=rank: rank)
        parts.append(sharded.local_part(weight))
    assert torch.equal(torch.cat(parts), whole)
