"""Every kind of adapter is rebuilt in a replica with the logits of the trained module, or refused at construction."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import VOCAB
from trl_a3po.engines.transformers.forward import ModelForward
from trl_a3po.models.replica import build_replica, check_replica, load_update
from trl_a3po.publish.collect import collect_weights, policy_sources, policy_spec

LAYERS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "LoRA on embeddings": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
    "LoRA beside some tokens": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, trainable_token_indices=[3, 5]),
    "some tokens": lambda: peft.TrainableTokensConfig(token_indices=[5, 6], target_modules=["embed_tokens"]),
    "VeRA": lambda: peft.VeraConfig(r=8, target_modules=LAYERS),
    "VeRA without its projection": lambda: peft.VeraConfig(r=8, target_modules=LAYERS, save_projection=False),
    "RandLoRA": lambda: peft.RandLoraConfig(r=4, target_modules=LAYERS),
    "DeLoRA": lambda: peft.DeloraConfig(r=4, target_modules=LAYERS),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=LAYERS),
    "IA3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["down_proj"]),
}


def adapted(model_path, config):
    torch.manual_seed(1)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), config).eval()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
@torch.no_grad()
def test_a_replica_follows_the_adapter(model_path, make):
    model = adapted(model_path, make())
    spec, ids = policy_spec(model, torch.float32), torch.randint(3, 60, (2, 9))
    check_replica(spec, {name: source.shape for name, source in policy_sources(model).items()})
    replica = build_replica(spec, "cpu")
    load_update(replica, collect_weights(model, 0, complete=True))
    torch.testing.assert_close(replica(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn_like(parameter))
    load_update(replica, collect_weights(model, 1, complete=False))
    torch.testing.assert_close(replica(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_a_second_adapter_is_not_part_of_the_policy(model_path):
    model = adapted(model_path, KINDS["VeRA"]())
    model.add_adapter("ref", KINDS["VeRA"]())
    model.set_adapter("default")
    check_replica(
        policy_spec(model, torch.float32), {name: source.shape for name, source in policy_sources(model).items()}
    )


@pytest.mark.parametrize("kind", ["LoRA on embeddings", "LoRA beside some tokens", "some tokens"])
def test_the_engine_samples_from_adapted_embeddings(model_path, kind):
    model = adapted(model_path, KINDS[kind]())
    replica = build_replica(policy_spec(model, torch.float32), "cpu")
    load_update(replica, collect_weights(model, 0, complete=True))
    assert ModelForward(replica).vocab_size == VOCAB
