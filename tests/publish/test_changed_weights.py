"""Frozen weights that engines may read where they are: until they are about to change."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_config
from trl_a3po.models.replica import build_replica, load_update, named_weights
from trl_a3po.publish.collect import policy_sources, policy_spec
from trl_a3po.publish.local_policy import LocalPolicy


def lora_model(**changes):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))


def frozen_names(model) -> set[str]:
    return {name for name, weight in model.named_parameters() if not weight.requires_grad}


def test_a_complete_update_names_what_is_frozen():
    model = lora_model()
    policy = LocalPolicy(model, policy_sources)
    complete = policy.update(0, complete=True)
    assert complete.frozen == frozen_names(model)
    assert all(complete.specs[n].data_ptr() == model.get_parameter(n).data_ptr() for n in complete.frozen)
    assert policy.update(1).frozen == frozenset()


def test_a_replica_uses_the_frozen_weights_that_exist():
    model = lora_model(tie_word_embeddings=True)
    update = LocalPolicy(model, policy_sources).update(0, complete=True)
    existing = {name: update.specs[name] for name in update.frozen}
    replica = build_replica(policy_spec(model, torch.float32), "cpu", existing)
    load_update(replica, update)
    weights = named_weights(replica)
    for name, tensor in update.tensors.items():
        assert (weights[name].data_ptr() == tensor.data_ptr()) == (name in existing)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(replica(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_a_frozen_weight_that_is_trained_from_now_on_is_moved_before_its_next_step():
    model = lora_model()
    policy = LocalPolicy(model, policy_sources)
    read = policy.update(0, complete=True).specs
    name = next(name for name in sorted(frozen_names(model)) if "norm" in name)
    weight = model.get_parameter(name).requires_grad_(True)
    sent = policy.update(1).tensors
    assert name in sent and sent[name].data_ptr() != read[name].data_ptr()
    with torch.no_grad():
        weight.add_(1.0)
    assert torch.equal(read[name], torch.ones_like(weight)) and torch.equal(sent[name], weight)


def test_a_frozen_weight_that_was_written_to_is_sent_in_other_memory():
    model = lora_model()
    policy = LocalPolicy(model, policy_sources)
    read = policy.update(0, complete=True).specs
    name = next(name for name in sorted(frozen_names(model)) if "norm" in name)
    with torch.no_grad():
        model.get_parameter(name).mul_(2.0)
    sent = policy.update(1).tensors
    assert sent[name].data_ptr() != read[name].data_ptr() and torch.equal(sent[name], model.get_parameter(name))
    assert name not in policy.update(2).tensors


def test_a_frozen_weight_that_has_changed_is_checked_before_it_is_sent():
    model = lora_model()

    def refuse(names):
        raise ValueError(f"not {sorted(names)}")

    policy = LocalPolicy(model, policy_sources, refuse)
    policy.update(0, complete=True)
    name = next(name for name in sorted(frozen_names(model)) if "norm" in name)
    with torch.no_grad():
        model.get_parameter(name).mul_(2.0)
    with pytest.raises(ValueError, match=name):
        policy.update(1)


def test_a_weight_that_is_frozen_later_is_sent_on_and_is_no_frozen_weight_that_has_changed(caplog):
    model, checked = lora_model(), []
    policy = LocalPolicy(model, policy_sources, checked.append)
    policy.update(0, complete=True)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    sent = policy.update(1).tensors.keys()
    for name in trained:
        model.get_parameter(name).requires_grad_(False)
    assert trained and policy.update(2).tensors.keys() == policy.update(3).tensors.keys() == sent
    assert checked == [] and caplog.text == ""


def test_a_weight_is_moved_once():
    model = lora_model()
    policy = LocalPolicy(model, policy_sources)
    policy.update(0, complete=True)
    name = next(name for name in sorted(frozen_names(model)) if "norm" in name)
    weight = model.get_parameter(name).requires_grad_(True)
    policy.update(1)
    place = weight.data_ptr()
    policy.update(2)
    assert weight.data_ptr() == place


def test_frozen_weights_that_stay_are_not_moved():
    model = lora_model()
    before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    policy = LocalPolicy(model, policy_sources)
    for version in range(3):
        policy.update(version, complete=version == 0)
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before
