"""FSDP2 in two processes on a CPU: what is published is what one process holds, and a run goes on where it was saved.

`test_same_as_one_process.py` trains the same runs with FSDP2 as with DDP and ZeRO.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed import fsdp
from transformers import AutoModelForCausalLM

from tests.distributed import sharded
from tests.distributed.launch import launch
from tests.tiny import save_tiny_model, tiny_config
from trl_a3po.models.fsdp_groups import groups_complete

pytestmark = pytest.mark.timeout(900)
EACH_ONCE = (("fsdp2", ()), ("fsdp2-full", ("lora",)), ("fsdp2-older", ("lora",)))


def same_weights(folder, name, mode):
    """The run `name` has trained in `mode` what it trains in one process."""
    expected, trained = (load_file(*(folder / where / name).glob("*model.safetensors")) for where in ("one", mode))
    for key, weight in expected.items():
        torch.testing.assert_close(trained[key], weight, rtol=1e-5, atol=1e-5, msg=f"{name}: {key}")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    done = launch("tests.distributed.sharded", folder, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:]
    return {name: torch.load(folder / f"{name}.pt", weights_only=False) for name in sharded.MODELS}


def same(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype and type(found[name]) is torch.Tensor
        torch.testing.assert_close(found[name], weight, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("name", list(sharded.MODELS))
def test_an_update_holds_the_weights_of_the_plain_model(published, name):
    """Also after a forward that has left weights whole, in the dtype of the forward."""
    same(published[name]["sharded"]["whole"], published[name]["plain"]["whole"])


@pytest.mark.long
@pytest.mark.parametrize("name", list(sharded.MODELS))
def test_a_later_update_holds_what_is_trained(published, name):
    assert set(published[name]["sharded"]["changed"]) == published[name]["changed"]


@pytest.mark.long
@pytest.mark.parametrize("name", list(sharded.MODELS))
def test_perturbed_weights_are_those_of_the_plain_model_and_the_trained_ones_come_back(published, name):
    found = published[name]
    same(found["sharded"]["perturbed"], found["plain"]["perturbed"], tolerance=1e-6)
    same(found["sharded"]["perturbed again"], found["sharded"]["perturbed"])
    moved = [n for n, weight in found["sharded"]["perturbed"].items() if not weight.equal(found["plain"]["whole"][n])]
    assert moved
    same(found["sharded"]["restored"], found["plain"]["whole"])
    assert found["exact"]


@pytest.mark.long
def test_no_more_than_a_bucket_is_whole_at_a_time(published):
    """Of merged weights too, each of which is made of three."""
    assert all(0 < found["most"] <= 2 * sharded.BUCKET_BYTES for found in published.values())


@pytest.mark.long
def test_fingerprints_do_not_see_a_forward(published):
    assert not any(found["sharded"]["fingerprint moved"] for found in published.values())


@pytest.mark.long
def test_an_engine_is_built_from_the_plain_class(published):
    assert {found["class"] for found in published.values()} == {"LlamaForCausalLM"}


def groups(monkeypatch, model, torch_version, **options):
    """The names of the layers of `model` that accelerate has FSDP2 shard, one list for each call."""
    names, sharded = {module: name for name, module in model.named_modules()}, []

    def fully_shard(module, **options):
        sharded.append([names[m] for m in (module if isinstance(module, list) else [module])])

    monkeypatch.setattr(fsdp, "fully_shard", fully_shard)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, **options
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    with groups_complete(torch_version):
        fsdp2_prepare_model(SimpleNamespace(state=state, mixed_precision="no", is_main_process=True), model)
    assert fsdp.fully_shard is fully_shard
    return sharded


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_a_torch_that_does_not_complete_groups_gets_none(monkeypatch, tied, lora):
    """What accelerate does not shard apart stays in the group of the model, which every forward calls."""
    model = AutoModelForCausalLM.from_config(tiny_config(tie_word_embeddings=tied))
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    whole, parts = (groups(monkeypatch, model, version) for version in ("2.13.0+cpu", "2.12.1+cu130"))
    assert any(len(group) > 1 for group in whole) == (tied or not lora)
    assert parts == [group for group in whole if len(group) == 1] and parts[-1] == [""]


def test_an_output_layer_alone_stays_with_the_model_where_weights_are_offloaded(monkeypatch):
    """TRL would gather it where its parts are, and compute there."""
    lora = LoraConfig(target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_config(tiny_config()), lora)
    offloaded, kept = (groups(monkeypatch, model, "2.13.0", cpu_offload=offload) for offload in (True, False))
    assert [group for group in kept if group not in offloaded] == [["base_model.model.lm_head"]]
    assert offloaded == [group for group in kept if group != ["base_model.model.lm_head"]]


@pytest.mark.long
def test_layers_that_stay_with_the_model_train_what_one_process_trains(tmp_path):
    """As with torch before 2.13: whichever torch is installed, this is what such a torch gets."""
    save_tiny_model(tmp_path / "model")
    save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    names = ("full", "lora", "saved-head", "reference", "tied", "tied-lora", "evaluation")
    for processes, mode in ((1, "one"), (2, "fsdp2-older")):
        done = launch("tests.distributed.runs", tmp_path, mode, *names, processes=processes, timeout=500)
        assert done.returncode == 0, done.stdout[-6000:]
    for name in names:
        same_weights(tmp_path, name, "fsdp2-older")


@pytest.mark.parametrize(
    ("mode", "lora"),
    [
        pytest.param(mode, lora, marks=pytest.mark.long if (mode, lora) in EACH_ONCE else pytest.mark.slow)
        for mode in ("fsdp2", "fsdp2-full", "fsdp2-older", "fsdp2-offload")
        for lora in ((), ("lora",))
    ],
    ids=lambda value: value if isinstance(value, str) else "lora" if value else "all weights",
)
def test_a_run_that_is_resumed_inside_a_batch_trains_as_if_it_was_not_stopped(tmp_path, mode, lora):
    save_tiny_model(tmp_path / "model")
    done = launch("tests.distributed.resumed", tmp_path, mode, *lora)
    assert done.returncode == 0, done.stdout[-6000:]
    whole, resumed = (load_file(*(tmp_path / name).glob("*model.safetensors")) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=0, msg=name)
    saved = {path.name for path in (tmp_path / "run" / "checkpoint-1").iterdir()}
    weights = "pytorch_model_fsdp.bin" if mode == "fsdp2-full" else "pytorch_model_fsdp_0"
    assert {weights, "a3po_state.json"} <= saved


@pytest.mark.long
def test_another_number_of_processes_goes_on(tmp_path):
    save_tiny_model(tmp_path / "model")
    module = "tests.distributed.resized"
    for processes, *arguments in ((2, "two"), (1, "one", "two/checkpoint-2"), (2, "again", "one/checkpoint-3")):
        done = launch(module, tmp_path, "fsdp2", *arguments, processes=processes)
        assert done.returncode == 0, done.stdout[-6000:]
    expected = load_file(tmp_path / "two" / "model" / "model.safetensors")
    for name in ("one", "again"):
        for key, weight in load_file(tmp_path / name / "model" / "model.safetensors").items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-5, msg=f"{name}: {key}")


@pytest.mark.long
def test_log_probs_keep_their_precision_under_mixed_precision(tmp_path):
    """The gap between the engine, which computes in bfloat16 too, and the trainer is a fraction of what it would be
    with log-probs of about -3 in bfloat16: these are 0.016 apart. How large either is depends on the CPU's kernels: on
    an AMD EPYC, the gap is 0.005, and 0.010 with such log-probs."""
    save_tiny_model(tmp_path / "model")
    done = launch("tests.distributed.runs", tmp_path, "fsdp2-bf16", "full")
    assert done.returncode == 0, done.stdout[-6000:]
    history = json.loads((tmp_path / "fsdp2-bf16" / "full" / "log.json").read_text())["history"]
    assert 0 < history[0]["a3po/engine_gap/mean"] < 7e-3
    assert history[0]["a3po/forward/token_ratio"] > 1.1  # packed


@pytest.mark.long
def test_four_processes_with_hybrid_sharding_train_what_one_process_trains(tmp_path):
    save_tiny_model(tmp_path / "model")
    for processes, mode in ((1, "one"), (4, "fsdp2-hybrid")):
        done = launch("tests.distributed.runs", tmp_path, mode, "full", "merged", processes=processes, timeout=500)
        assert done.returncode == 0, done.stdout[-6000:]
    for name in ("full", "merged"):
        same_weights(tmp_path, name, "fsdp2-hybrid")


@pytest.mark.long
def test_weights_that_are_offloaded_train_what_one_process_trains(tmp_path):
    """With `fsdp_offload_params`, as far as a CPU shows it: parts of weights, gradients and the optimizer's states lie
    where an accelerator does not compute."""
    save_tiny_model(tmp_path / "model")
    save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    names = ("full", "merged", "saved-head", "reference", "tied-lora", "evaluation")
    for processes, mode in ((1, "one"), (2, "fsdp2-offload")):
        done = launch("tests.distributed.runs", tmp_path, mode, *names, processes=processes, timeout=500)
        assert done.returncode == 0, done.stdout[-6000:]
    for name in names:
        same_weights(tmp_path, name, "fsdp2-offload")
        log = json.loads((tmp_path / "fsdp2-offload" / name / "log.json").read_text())
        assert log["offloads"]
        assert log["published"] == json.loads((tmp_path / "one" / name / "log.json").read_text())["published"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "lora", "merged", "reference", "tied", "tied-lora", "evaluation"])
def test_two_gpus_train_what_one_process_trains(tmp_path, name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    save_tiny_model(tmp_path / "model")
    save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    for processes, mode, config in ((1, "one", None), (2, "fsdp2-gpu", "fsdp2")):
        done = launch("tests.distributed.runs", tmp_path, mode, name, processes=processes, config=config)
        assert done.returncode == 0, done.stdout[-6000:]
    expected, trained = (
        load_file(*(tmp_path / mode / name).glob("*model.safetensors")) for mode in ("one", "fsdp2-gpu")
    )
    for key, weight in expected.items():
        torch.testing.assert_close(trained[key].float(), weight.float(), rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.gpu
def test_two_gpus_resume_inside_a_batch(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    save_tiny_model(tmp_path / "model")
    done = launch("tests.distributed.resumed", tmp_path, "fsdp2-gpu", config="fsdp2")
    assert done.returncode == 0, done.stdout[-6000:]
    whole, resumed = (load_file(*(tmp_path / name).glob("*model.safetensors")) for name in ("whole", "resumed"))
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=1e-6, msg=name)
