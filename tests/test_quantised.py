"""QLoRA: an adapter on weights of 4 bits, sampled by an engine that holds them dequantised."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.runs import RunsAhead, build, logged
from tests.tiny import save_tiny_model
from trl_a3po.engines.vllm.weight_names import base_weights
from trl_a3po.models.replica import build_replica, load_update, named_weights
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.collect import collect_weights, policy_spec
from trl_a3po.publish.local_policy import probe_logps
from trl_a3po.publish.quantised import is_quantised, prevent_repacking

pytestmark = pytest.mark.long

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
PROMPTS, COMPLETIONS = [[3, 4, 5, 6]], [[7, 8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128)


def adapter() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize("double", [False, True], ids=["", "double quantisation"])
def test_the_replica_computes_what_the_quantised_model_computes(model_path, double):
    config = BitsAndBytesConfig(**FOUR_BITS, bnb_4bit_use_double_quant=double)
    base = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=config, dtype=torch.float32)
    model = get_peft_model(base, adapter())
    prevent_repacking(model)
    stored = {name: weight.clone() for name, weight in named_weights(model).items() if is_quantised(weight)}
    replica = build_replica(policy_spec(model, torch.float32), "cpu")
    load_update(replica, collect_weights(model, 0, complete=True))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)
    load_update(replica, update := collect_weights(model, 1, complete=False))

    known = [probe_logps(each, PROMPTS, COMPLETIONS, 1.0) for each in (model, replica)]
    torch.testing.assert_close(*known, rtol=0, atol=1e-5)
    assert len(stored) == 14 and not any(name in update.tensors for name in stored)
    assert all(torch.equal(named_weights(model)[name], weight) for name, weight in stored.items())
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert (probe_logps(plain, PROMPTS, COMPLETIONS, 1.0) - known[1]).abs().max() > 1e-2  # not those of 32 bits


def test_an_adapter_on_four_bits_trains_asynchronously_and_the_engine_follows(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, engine="transformers", engine_slots=8, engine_threads=1, max_staleness=2,
        delivery_check_steps=1, peft_config=adapter(), quantization_config=BitsAndBytesConfig(**FOUR_BITS),
    )  # fmt: skip
    trainer.add_callback(RunsAhead(trainer, 4))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if "lora_" in name
    }
    # TRL trains the adapter of a quantised model in bfloat16; the replica here computes with it in float32.
    assert max(logged(trainer, "a3po/delivery/gap")) < 2e-3
    assert 0 < max(logged(trainer, "a3po/engine_gap/mean")) < 2e-3
    assert max(logged(trainer, "a3po/staleness/max")) == 2


@pytest.mark.long
def test_a_resumed_run_trains_the_adapter_in_the_same_dtype(model_path, tmp_path):
    def trained(resume=None):
        trainer = build(
            model_path, tmp_path, schedule="fixed_lag", max_staleness=1, save_strategy="steps", save_steps=2,
            peft_config=adapter(), quantization_config=BitsAndBytesConfig(**FOUR_BITS),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters() if "lora_" in name}

    whole = trained()
    resumed = trained(str(tmp_path / "A3POTrainer" / "checkpoint-2"))
    assert {weight.dtype for weight in resumed.values()} == {torch.bfloat16}
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


@pytest.mark.long
def test_a_trained_output_layer_is_checked_in_the_dtype_it_is_trained_in(model_path, tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    trainer = build(
        model_path, tmp_path, engine="transformers", engine_slots=8, engine_threads=1, delivery_check_steps=1,
        max_steps=2, peft_config=config, quantization_config=BitsAndBytesConfig(**FOUR_BITS),
    )  # fmt: skip
    trainer.train()
    assert max(logged(trainer, "a3po/delivery/gap")) < 0.05


def test_vllm_in_a_process_of_the_trainer_gets_the_base_dequantised_under_its_plain_names(model_path):
    config = BitsAndBytesConfig(**FOUR_BITS)
    base = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=config, dtype=torch.float32)
    model = get_peft_model(base, adapter())
    spec = policy_spec(model, torch.float32)
    plain = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32)
    published = collect_weights(model, 0, complete=True)
    load_update(plain, WeightUpdate(0, dict(base_weights(published.tensors, {}))))
    prevent_repacking(model)
    with model.disable_adapter():
        expected = probe_logps(model, PROMPTS, COMPLETIONS, 1.0)
    torch.testing.assert_close(probe_logps(plain, PROMPTS, COMPLETIONS, 1.0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
            r"quantise with .*\(load_in_4bit=True\)",
        ),
        (
            {"engine": "vllm", "vllm_server_urls": ["http://localhost:1"]},
            "vllm_server_urls=.*hold other weights",
        ),
        ({"lora_sync": "merged"}, "cannot merge .*Linear4bit"),
    ],
    ids=["8 bits", "servers that run already", "merged"],
)
def test_what_no_engine_can_hold_as_it_is_trained_is_refused(model_path, tmp_path, settings, words):
    options = {"peft_config": adapter(), "quantization_config": BitsAndBytesConfig(**FOUR_BITS), **settings}
    with pytest.raises(ValueError, match=words):
        build(model_path, tmp_path, **options)


def test_weights_that_were_repacked_for_inference_are_refused(model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=BitsAndBytesConfig(**FOUR_BITS))
    model.get_submodule("model.layers.1.mlp.up_proj").weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"has repacked '.*layers\.1\.mlp\.up_proj\.weight' for inference"):
        prevent_repacking(model)
