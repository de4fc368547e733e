"""Models whose output layer FSDP2 shards in several ways, in one process with gloo: which layers TRL's forward had to
gather by itself, and what `check_head` says. Writes `heads.json` into the folder that it is given.

A process of its own: torch's cache of DTensor layouts keeps a process group that was destroyed, and a child that
another thread forks frees it, which joins threads that the child does not have (torch 2.13).
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from tests.tiny import tiny_config
from tests.vision import FAMILIES
from trl_a3po.checks.policy import check_head
from trl_a3po.models.fsdp_groups import groups_complete, is_gathered_uncalled

VERSIONS = (torch.__version__, "2.12.1")  # the torch installed, and an older one
IDS = torch.arange(2, 8)[None]


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


def refused(model):
    """What `check_head` raises; empty if it accepts the model."""
    try:
        check_head(model)
    except ValueError as error:
        return str(error)
    return ""


def examined(name, version):
    make, options, _ = CASES[name]
    model = make()
    add_fused_lm_head(model.get_base_model() if name == "modules_to_save" else model)
    head = model.get_output_embeddings()
    shape, gathered, said = list(head.weight.shape), [], []
    model = sharded(model, version, **options)
    full_tensor = DTensor.full_tensor
    DTensor.full_tensor = lambda self: (gathered.append(list(self.shape)), full_tensor(self))[1]
    try:
        for _ in range(2):  # a backward may leave other weights gathered than the forward found
            said.append(is_gathered_uncalled(model, head))
            model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS, fused_lm_head=True).loss.backward()
    finally:
        DTensor.full_tensor = full_tensor
    return {"shape": shape, "gathered": gathered, "said": said, "refused": refused(model)}


def frozen():
    model = sharded(get_peft_model(text(), LoraConfig(target_modules=["q_proj"])), torch.__version__)
    before = refused(model)
    model.get_output_embeddings().requires_grad_(True)
    return {"frozen": before, "trained": refused(model)}


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {name: [examined(name, version) for version in VERSIONS] for name in CASES}
    found |= {"frozen": frozen(), "not sharded": refused(head_saved())}
    (Path(sys.argv[1]) / "heads.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
