"""Adapters and checkpoints as vLLM reads them from disk."""

import errno
import json
import os

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config
from trl_a3po.engines.vllm.adapter_support import adapter_obstacle
from trl_a3po.engines.vllm.servers.adapter_folders import AdapterFolders
from trl_a3po.engines.vllm.servers.checkpoint_folder import CheckpointFolder
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.collect import collect_weights, policy_spec

IDS = torch.tensor([[3, 4, 5, 6]])


def tiny(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.float32)


def test_a_written_adapter_is_what_peft_loads(tmp_path):
    model = get_peft_model(tiny(), LoraConfig(r=2, lora_alpha=8, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    folders = AdapterFolders(tmp_path, policy_spec(model, torch.float32), keep=2)
    folders.write(collect_weights(model, 3, complete=False))
    loaded = PeftModel.from_pretrained(tiny(), folders.folders[folders.newest])
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    assert "-v3-" in folders.newest


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_checkpoint_is_what_transformers_loads(tmp_path, tied):
    model = tiny(tie_word_embeddings=tied)
    checkpoint = CheckpointFolder(tmp_path, policy_spec(model, torch.float32))
    checkpoint.write(collect_weights(model, 0, complete=True))
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)


def without_hard_links(*paths):
    raise OSError(errno.ENOTSUP, "Operation not supported")


@pytest.mark.parametrize("link", [os.link, without_hard_links])
def test_a_checkpoint_of_what_training_changes_is_completed(tmp_path, monkeypatch, link):
    monkeypatch.setattr(os, "link", link)
    model = tiny()
    model.model.embed_tokens.requires_grad_(False)
    checkpoint = CheckpointFolder(tmp_path, policy_spec(model, torch.float32))
    checkpoint.write(collect_weights(model, 0, complete=True))
    for version in (1, 2):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.add_(0.1)
        update = collect_weights(model, version, complete=False)
        assert "model.embed_tokens.weight" not in update.tensors
        checkpoint.write(update)
        loaded = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
        assert len(list(tmp_path.iterdir())) == 1


def test_the_dtype_is_the_engines(tmp_path):
    model = tiny()
    checkpoint = CheckpointFolder(tmp_path, policy_spec(model, torch.bfloat16))
    checkpoint.write(collect_weights(model, 0, complete=True))
    assert AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="auto").dtype == torch.bfloat16
    assert json.loads((checkpoint.folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_name_never_stands_for_two_sets_of_weights(tmp_path):
    model = get_peft_model(tiny(), LoraConfig(r=2, target_modules="all-linear"))
    folders = [AdapterFolders(tmp_path, policy_spec(model, torch.float32), keep=2) for _ in range(2)]
    update = WeightUpdate(1, collect_weights(model, 1, complete=False).tensors, complete=False)
    for folder in folders:
        folder.write(update)
        folder.write(update)
    assert len({name for folder in folders for name in folder.folders}) == 4


OBSTACLES = [
    ({}, None),
    ({"use_rslora": True}, None),
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["norm"]}, "modules_to_save"),
    ({"bias": "all"}, "bias='all'"),
    ({"target_modules": ["q_proj", "lm_head"]}, "embeddings and heads"),
    ({"r": 600}, "its rank is 600"),
    ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
]


@pytest.mark.parametrize(("settings", "words"), OBSTACLES, ids=[str(list(s)) for s, _ in OBSTACLES])
def test_what_vllm_cannot_serve_is_known(settings, words):
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj", "o_proj"], **settings})
    model = get_peft_model(tiny(), config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    obstacle = adapter_obstacle(model.active_peft_config, trained)
    assert obstacle is None if words is None else words in obstacle


def test_a_weight_trained_beside_the_adapter_is_an_obstacle():
    model = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.get_base_model().model.norm.weight.requires_grad_(True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "trained beside it" in adapter_obstacle(model.active_peft_config, trained)
