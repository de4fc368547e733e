"""A trained output layer under FSDP2: TRL's forward uses its weight without calling it, and trains it right only where
FSDP2 has gathered it."""

import json

import pytest

from tests.distributed.launch import launch
from tests.distributed.sharded_heads import CASES
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    done = launch("tests.distributed.sharded_heads", folder, processes=1)
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads((folder / "heads.json").read_text())


@pytest.mark.parametrize("version", [0, 1], ids=["the torch installed", "an older one"])
@pytest.mark.parametrize("name", CASES)
def test_an_output_layer_is_accepted_if_trls_forward_finds_it_gathered(found, name, version):
    accepted, examined = CASES[name][2], found[name][version]
    assert examined["said"] == [accepted, accepted]
    assert examined["gathered"] == ([] if accepted else [examined["shape"]] * 2)
    if accepted:
        assert not examined["refused"]
    else:
        assert "would not be averaged over the processes: set fsdp_auto_wrap_policy" in examined["refused"]


def test_a_frozen_output_layer_is_accepted_wherever_it_is(found):
    assert not found["frozen"]["frozen"]
    assert "in a group of its own" in found["frozen"]["trained"]


def test_a_model_that_is_not_sharded_is_accepted(found):
    assert not found["not sharded"]


def test_a_run_is_refused_before_its_engine_starts(tmp_path):
    save_tiny_model(tmp_path / "model")
    done = launch("tests.distributed.runs", tmp_path, "fsdp2-linear", "full")
    assert done.returncode != 0
    assert "ValueError: The output layer is trained, and FSDP2 shards it in a group of its own" in done.stdout
    assert "starting the engine" not in done.stdout
