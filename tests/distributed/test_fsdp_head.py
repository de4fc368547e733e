"""A trained output layer under FSDP2: TRL's forward uses its weight without calling it, and trains it right only where
FSDP2 has gathered it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from tests.distributed.launch import launch
from tests.tiny import save_tiny_model, tiny_config
from tests.vision import FAMILIES
from trl_a3po.checks.policy import check_head
from trl_a3po.models.fsdp_groups import groups_complete, is_gathered_uncalled

IDS = torch.arange(2, 8)[None]


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def text(**config):
    return AutoModelForCausalLM.from_config(tiny_config(**config))


def images():
    return FAMILIES["qwen2_5_vl"].model()


def head_saved():
    return get_peft_model(text(), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))


NORMS = {"transformer_cls_names_to_wrap": ["LlamaDecoderLayer", "LlamaRMSNorm"]}
LINEAR = {"transformer_cls_names_to_wrap": ["Linear"]}
LARGE = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 50_000}
CASES = {  # a model, how its launch shards it, and whether it is accepted
    "grouped with the norm": (text, {}, True),
    "tied": (lambda: text(tie_word_embeddings=True), {}, True),
    "no layer is sharded apart": (text, {"auto_wrap_policy": "no_wrap"}, True),
    "no layer is large enough": (text, LARGE, True),
    "the norm is sharded apart": (text, NORMS, True),
    "a norm that accelerate does not find": (images, {}, True),
    "modules_to_save": (head_saved, {}, True),
    "linear layers are sharded apart": (text, LINEAR, False),
    "large layers are sharded apart": (lambda: text(vocab_size=2000), LARGE, False),
}


def sharded(model, version, **options):
    """`model` as accelerate shards it in a training."""
    settings = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": False}
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(**(settings | options)))
    accelerator = SimpleNamespace(state=state, mixed_precision="no", is_main_process=True, device=torch.device("cpu"))
    with groups_complete(version):
        return fsdp2_prepare_model(accelerator, model)


@pytest.mark.parametrize("version", [torch.__version__, "2.12.1"], ids=["the torch installed", "an older one"])
@pytest.mark.parametrize("name", CASES)
def test_an_output_layer_is_accepted_if_trls_forward_finds_it_gathered(alone, monkeypatch, name, version):
    make, options, accepted = CASES[name]
    model = make()
    add_fused_lm_head(model.get_base_model() if name == "modules_to_save" else model)
    head = model.get_output_embeddings()
    shape, gathered = head.weight.shape, []
    model = sharded(model, version, **options)
    full_tensor = DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda self: (gathered.append(self.shape), full_tensor(self))[1])
    for _ in range(2):  # a backward may leave other weights gathered than the forward found
        assert is_gathered_uncalled(model, head) == accepted
        model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS, fused_lm_head=True).loss.backward()
    assert gathered == ([] if accepted else [shape, shape])
    if accepted:
        check_head(model)
    else:
        with pytest.raises(ValueError, match=r"would not be averaged over the processes: set fsdp_auto_wrap_policy"):
            check_head(model)


def test_a_frozen_output_layer_is_accepted_wherever_it_is(alone):
    model = sharded(get_peft_model(text(), LoraConfig(target_modules=["q_proj"])), torch.__version__)
    check_head(model)
    model.get_output_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match="in a group of its own"):
        check_head(model)


def test_a_model_that_is_not_sharded_is_accepted():
    check_head(head_saved())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_is_refused_before_its_engine_starts(tmp_path):
    save_tiny_model(tmp_path / "model")
    done = launch("tests.distributed.runs", tmp_path, "fsdp2-linear", "full")
    assert done.returncode != 0
    assert "ValueError: The output layer is trained, and FSDP2 shards it in a group of its own" in done.stdout
    assert "starting the engine" not in done.stdout
