"""vLLM starts only where its share of a GPU's memory is free, so it is given what the staged weights leave."""

import pytest
import torch

from trl_a3po.engines.staging import Handle, Place
from trl_a3po.engines.vllm.process.vllm_worker import share_beside

GIB = 2**30


@pytest.mark.parametrize(
    ("share", "staged", "expected"),
    [
        (0.9, 1, 0.9),
        (0.9, 15, 0.97 - 15 / 80),  # 7 billion parameters in bfloat16
        (0.3, 15, 0.3),  # of a GPU that trains too
    ],
)
def test_staged_weights_and_the_share_of_vllm_fit_on_a_gpu(share, staged, expected):
    found = share_beside(share, staged * GIB, total_bytes=80 * GIB)
    assert found == pytest.approx(expected)
    assert found + staged / 80 <= 0.97


def test_a_handle_tells_what_it_holds_of_a_gpu():
    places = (Place("a", (4,), torch.float32, 0, 16), Place("b", (2,), torch.float32, 256, 8))
    assert Handle(print, (), places, {}, frozenset()).gpu_bytes == 264
    assert Handle(3, 264, places, {}, frozenset()).gpu_bytes == 0
    assert Handle("/proc/1/fd/3", 264, places, {}, frozenset()).gpu_bytes == 0
    assert Handle(print, (), (), {}, frozenset()).gpu_bytes == 0  # every weight is the trainer's own
