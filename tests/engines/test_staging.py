"""What is written into the staging memory is what the other side reads."""

import os

import pytest
import torch

from trl_a3po.engines.staging import Staging, attach, usable_in_place
from trl_a3po.protocol.weights import WeightUpdate

CPU = torch.device("cpu")


def update(seed: int, dtype=torch.float32) -> WeightUpdate:
    generator = torch.Generator().manual_seed(seed)
    return WeightUpdate(
        seed,
        {
            "matrix": torch.randn(7, 5, generator=generator).to(dtype),
            "scalar": torch.randn((), generator=generator).to(dtype),
            "empty": torch.zeros(0, 3, dtype=dtype),
            "transposed": torch.randn(4, 6, generator=generator).to(dtype).t(),
            "counter": torch.tensor([seed, 2, 3]),
        },
    )


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_arrive_in_the_replicas_dtype(trained, stored):
    staging = Staging(update(1, trained), stored, CPU)
    views = attach(staging.handle())
    staging.write(update(2, trained))
    for name, tensor in update(2, trained).tensors.items():
        expected = tensor.to(stored) if tensor.is_floating_point() else tensor
        torch.testing.assert_close(views[name], expected, rtol=0, atol=0)
    staging.close()


def test_an_incomplete_write_leaves_the_rest_as_it_was():
    staging = Staging(update(1), torch.float32, CPU)
    views = attach(staging.handle())
    matrix = update(2).tensors["matrix"]
    assert staging.write(WeightUpdate(2, {"matrix": matrix}, complete=False)) == (matrix.nbytes, None)
    assert torch.equal(views["matrix"], matrix)
    assert torch.equal(views["transposed"], update(1).tensors["transposed"])
    staging.close()


def test_bfloat16_takes_half_the_memory():
    sizes = {
        dtype: Staging(WeightUpdate(0, {"w": torch.zeros(1024, 1024)}), dtype, CPU).places[-1].size
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert sizes[torch.float32] == 2 * sizes[torch.bfloat16]


def test_close_frees_the_file_descriptor():
    staging = Staging(update(1), torch.float32, CPU)
    [fd] = staging.fds
    os.fstat(fd)
    staging.close()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_frozen_weights_have_one_place_that_the_replica_uses():
    whole = update(1)
    staging = Staging(WeightUpdate(1, whole.tensors, frozen=frozenset({"matrix", "transposed"})), torch.float32, CPU)
    handle = staging.handle()
    views = attach(handle)
    existing = usable_in_place(handle, views, CPU)
    assert set(existing) == {"matrix", "transposed"}
    assert all(existing[name].data_ptr() == views[name].data_ptr() for name in existing)
    assert usable_in_place(handle, views, torch.device("cuda:0")) == {}
    # A frozen weight that changes nevertheless is written where it is read.
    staging.write(WeightUpdate(2, {"matrix": update(2).tensors["matrix"]}, complete=False))
    assert torch.equal(existing["matrix"], update(2).tensors["matrix"])
    staging.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_frozen_weights_on_the_replicas_gpu_are_not_copied():
    on_gpu = {name: tensor.cuda() for name, tensor in update(1).tensors.items()}
    frozen = frozenset({"matrix", "scalar"})
    staging = Staging(WeightUpdate(1, on_gpu, frozen=frozen), torch.float32, torch.device("cuda:0"))
    assert set(staging.shared) == frozen
    assert {place.name for place in staging.places} == set(on_gpu) - frozen
    assert staging.write(WeightUpdate(2, {"matrix": on_gpu["matrix"]}, complete=False))[0] == 0
    elsewhere = update(2).tensors["matrix"].cuda()
    written, arrival = staging.write(WeightUpdate(3, {"matrix": elsewhere}, complete=False))
    arrival.wait()
    assert written == elsewhere.nbytes
    assert torch.equal(staging.shared["matrix"], elsewhere)
    assert set(Staging(WeightUpdate(1, on_gpu, frozen=frozen), torch.bfloat16, torch.device("cuda:0")).shared) == set()
    staging.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("replica", ["cpu", "cuda:0"])
def test_what_arrives_is_what_the_weights_were_when_the_write_returned(replica):
    weights = {name: tensor.cuda() for name, tensor in update(1).tensors.items()}
    weights["large"] = torch.randn(2**26, device="cuda")
    staging = Staging(WeightUpdate(1, weights), torch.bfloat16, torch.device(replica))
    before = {name: tensor.clone() for name, tensor in weights.items()}
    _, arrival = staging.write(WeightUpdate(2, weights))
    for tensor in weights.values():  # training goes on
        tensor.zero_()
    arrival.wait()
    for name, view in staging._views.items():
        assert torch.equal(view.cuda(), before[name].to(view.dtype))
    staging.close()
