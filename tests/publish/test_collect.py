"""A replica built from a spec and fed with updates computes what the trained module computes."""

import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trl_a3po.models.replica import build_replica, load_update, named_weights
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.collect import collect_weights, policy_spec
from trl_a3po.publish.merged import collect_merged, merged_spec

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).eval()


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)).eval()


def mixture_of_experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, head_dim=8)).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4)).eval()


def adapted(model, **settings):
    """`model` with an adapter whose every weight has a value that matters."""
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
    perturb(model)
    return model.eval()


@torch.no_grad()
def perturb(model):
    """A step of training: every trainable weight moves."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn_like(parameter))


@torch.no_grad()
def logps(model) -> torch.Tensor:
    ids = torch.arange(40).reshape(2, 20) * 7 % 61
    return model(input_ids=ids).logits.log_softmax(-1)


POLICIES = {
    "llama tied": lambda: llama(True),
    "llama untied": lambda: llama(False),
    "qwen3": qwen3,
    "gpt2": gpt2,
    "mixture of experts": mixture_of_experts,
    "lora": lambda: adapted(llama(True), target_modules="all-linear"),
    "lora on gpt2": lambda: adapted(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "lora on experts": lambda: adapted(mixture_of_experts(), target_modules=["q_proj", "v_proj"]),
    "dora": lambda: adapted(llama(False), target_modules="all-linear", use_dora=True),
    "rslora": lambda: adapted(qwen3(), target_modules="all-linear", use_rslora=True),
    "pissa": lambda: adapted(llama(True), target_modules=["q_proj"], init_lora_weights="pissa"),
    "lora on tied embeddings": lambda: adapted(llama(True), target_modules=["q_proj", "embed_tokens"]),
    "modules_to_save, tied": lambda: adapted(llama(True), target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "modules_to_save, untied": lambda: adapted(llama(False), target_modules=["v_proj"], modules_to_save=["norm"]),
    "bias": lambda: adapted(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True),
}
PLAIN = ("llama tied", "llama untied", "qwen3", "gpt2", "mixture of experts")
ADAPTED = [name for name in POLICIES if name not in PLAIN]


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]()


@pytest.fixture(params=ADAPTED)
def adapted_policy(request):
    return POLICIES[request.param]()


def replica_of(model):
    replica = build_replica(policy_spec(model, torch.float32), "cpu")
    load_update(replica, collect_weights(model, 0, complete=True))
    return replica


def test_a_replica_computes_the_log_probs_of_the_trained_model(policy):
    torch.testing.assert_close(logps(replica_of(policy)), logps(policy), atol=1e-6, rtol=0)


def test_what_training_changes_reaches_the_replica_by_an_incomplete_update(policy):
    replica, before = replica_of(policy), logps(policy)
    perturb(policy)
    assert (logps(policy) - before).abs().max() > 1e-3
    load_update(replica, collect_weights(policy, 1, complete=False))
    torch.testing.assert_close(logps(replica), logps(policy), atol=1e-6, rtol=0)


def test_a_replica_uses_no_memory_of_the_trained_model(policy):
    replica, before = replica_of(policy), logps(policy)
    perturb(policy)
    torch.testing.assert_close(logps(replica), before, atol=1e-6, rtol=0)


def test_an_incomplete_update_of_an_adapter_holds_the_trainable_parameters_alone():
    model = POLICIES["lora"]()
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(collect_weights(model, 0, complete=False).tensors) == names


def test_weights_are_live_views_and_each_storage_appears_once(policy):
    tensors = collect_weights(policy, 0, complete=True).tensors
    pointers = [tensor.data_ptr() for tensor in tensors.values()]
    assert len(set(pointers)) == len(pointers)
    owned = {weight.data_ptr() for weight in named_weights(policy).values()}
    assert set(pointers) == owned
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_a_frozen_reference_adapter_is_left_out():
    model = adapted(llama(True), target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("ref", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    update = collect_weights(model, 0, complete=True)
    assert not [name for name in update.tensors if "ref" in name.split(".")]
    torch.testing.assert_close(logps(replica_of(model)), logps(model), atol=1e-6, rtol=0)


def test_a_patched_forward_does_not_reach_the_replica():
    model = llama(True)
    model.forward = lambda *args, **kwargs: None
    replica = replica_of(model)
    assert "forward" not in vars(replica)
    torch.testing.assert_close(logps(replica), logps(llama(True)), atol=1e-6, rtol=0)


def test_a_replica_in_bfloat16_keeps_its_rotary_frequencies_exact():
    model = llama(True)
    replica = build_replica(policy_spec(model, torch.bfloat16), "cpu")
    assert {parameter.dtype for parameter in replica.parameters()} == {torch.bfloat16}
    assert torch.equal(replica.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_tied_weights_of_a_replica_are_one_tensor():
    replica = replica_of(llama(True))
    assert replica.lm_head.weight is replica.model.embed_tokens.weight
    untied = replica_of(llama(False))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_complete_update_without_one_name_raises_and_changes_nothing():
    model = llama(True)
    replica, before = replica_of(model), logps(model)
    perturb(model)
    tensors = collect_weights(model, 1, complete=True).tensors
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_update(replica, WeightUpdate(1, tensors))
    assert torch.equal(logps(replica), before)


def test_an_unknown_name_raises():
    replica = replica_of(llama(True))
    with pytest.raises(ValueError, match=r"'lm_head\.weight', which the engine's replica does not have"):
        load_update(replica, WeightUpdate(1, {"lm_head.weight": torch.zeros(61, 32)}, complete=False))


def test_another_shape_raises():
    replica = replica_of(llama(True))
    with pytest.raises(ValueError, match=r"shape \(3,\) for 'model\.norm\.weight'"):
        load_update(replica, WeightUpdate(1, {"model.norm.weight": torch.zeros(3)}, complete=False))


def test_a_merged_replica_computes_the_log_probs_of_the_adapted_model(adapted_policy):
    model = adapted_policy
    weights = {name: weight.clone() for name, weight in named_weights(model).items()}
    replica = build_replica(merged_spec(model, torch.float32), "cpu")
    load_update(replica, collect_merged(model, 0))
    torch.testing.assert_close(logps(replica), logps(model), atol=1e-5, rtol=0)
    untouched = {name: torch.equal(weights[name], weight) for name, weight in named_weights(model).items()}
    assert all(untouched.values())


def test_an_incomplete_merged_update_follows_training(adapted_policy):
    model = adapted_policy
    replica = build_replica(merged_spec(model, torch.float32), "cpu")
    load_update(replica, collect_merged(model, 0))
    perturb(model)
    update = collect_merged(model, 1, complete=False)
    load_update(replica, update)
    torch.testing.assert_close(logps(replica), logps(model), atol=1e-5, rtol=0)


def test_an_incomplete_merged_update_leaves_out_what_is_frozen():
    model = POLICIES["lora"]()
    names = set(collect_merged(model, 1, complete=False).tensors)
    assert names == {name for name, _ in llama(True).named_parameters() if "_proj." in name}


def test_a_quantised_model_is_refused():
    model = llama(False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is stored as torch\.int8"):
        policy_spec(model, torch.float32)


def test_merged_weights_are_made_as_an_engine_goes_through_them():
    made: list[weakref.ref] = []
    for name, tensor in collect_merged(POLICIES["lora"](), 0).tensors.items():
        if "_proj." in name:
            assert sum(merged() is not None for merged in made) <= 1
            made.append(weakref.ref(tensor))
    assert len(made) == 14
