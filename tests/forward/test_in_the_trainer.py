"""A trainer that packs, or shares prompts, takes the optimizer steps of one that pads."""

import logging

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM

from tests.runs import (
    ScriptedGRPOTrainer,
    StoppingGRPOTrainer,
    assert_same_gradients,
    build,
    complete_or_stop,
    logged,
    train_recorded,
)
from tests.tiny import save_tiny_model, tiny_config
from trl_a3po.forward import training
from trl_a3po.forward.attention import PACKED, install_packed_attention
from trl_a3po.forward.micro_batches import is_sum_over_rows
from trl_a3po.forward.packing_support import packing_refusal
from trl_a3po.publish.collect import policy_spec
from trl_a3po.testing import StubEngine

pytestmark = pytest.mark.long

FORWARDS = {
    "packed": {"packed_forward": "on", "shared_prompt": "off"},
    "shared": {"packed_forward": "on", "shared_prompt": "on"},
    "auto": {},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def trained(model_path, tmp_path, *, lora=False, **settings):
    peft_config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
    engine = StubEngine(complete_or_stop)
    trainer = build(model_path, tmp_path, peft_config=peft_config, engine=engine, max_steps=2, **settings)
    gradients = train_recorded(trainer)
    return trainer, gradients


def assert_same_steps(model_path, tmp_path, forward, **settings):
    """The shuffle is seeded by `build` alike, so both trainers see the same micro-batches before rows are arranged."""
    padded, expected = trained(model_path, tmp_path, packed_forward="off", **settings)
    packed, found = trained(model_path, tmp_path, **FORWARDS[forward], **settings)
    assert_same_gradients(found, expected)
    assert logged(padded, "a3po/forward/token_ratio") == [1.0, 1.0]
    assert min(logged(packed, "a3po/forward/token_ratio")) > 1.2
    assert logged(packed, "loss") == pytest.approx(logged(padded, "loss"), abs=1e-4)
    if not is_sum_over_rows(packed.args):  # else rows move, and TRL's metrics are means of the micro-batches' means
        assert logged(packed, "entropy") == pytest.approx(logged(padded, "entropy"), abs=1e-4)


SETTINGS = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "kl": {"beta": 0.04},
    "entropy": {"entropy_coef": 0.05, "top_entropy_quantile": 0.5},
    "recompute": {"proximal_method": "recompute", "num_iterations": 2},
    "asympo": {"objective": "asympo", "loss_type": "grpo", "scale_rewards": "none"},
    "spo": {"objective": "spo", "loss_type": "grpo", "scale_rewards": "none"},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "masked": {"mask_truncated_completions": True},
    "without checkpointing": {"gradient_checkpointing": False},
    "two optimizer steps a batch": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "many small micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
}


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_steps_are_those_of_the_padded_forward(model_path, tmp_path, forward, lora):
    assert_same_steps(model_path, tmp_path, forward, lora=lora, beta=0.04)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_kind_of_loss(model_path, tmp_path, name):
    assert_same_steps(model_path, tmp_path, "shared", **SETTINGS[name])


def test_steps_are_those_of_grpo(model_path, tmp_path):
    """Not only those of our own padded forward."""
    expected = train_recorded(build(model_path, tmp_path, StoppingGRPOTrainer, max_steps=2))
    assert_same_gradients(trained(model_path, tmp_path, **FORWARDS["shared"])[1], expected)
    assert issubclass(StoppingGRPOTrainer, ScriptedGRPOTrainer)


def test_completions_of_a_prompt_meet_in_a_micro_batch(model_path, tmp_path):
    """Two groups of 4 in micro-batches of 4: shuffling scatters the groups; each then fills a micro-batch."""
    trainer = build(model_path, tmp_path, max_steps=1, **FORWARDS["shared"])
    layouts = []
    layout = trainer._training_forward._layout
    trainer._training_forward._layout = lambda *inputs: layouts.append(layout(*inputs)) or layouts[-1]
    trainer.train()
    assert [packed.row.shared for packed in layouts] == [1, 1]
    assert all(segment.prefix == 0 for packed in layouts for segment in packed.row.segments[1:])


@pytest.mark.parametrize("forward", FORWARDS)
def test_as_many_forwards_as_padded_ones_after_the_check_of_the_first_batch(model_path, tmp_path, forward):
    counts = {}
    for name, settings in {"padded": {"packed_forward": "off"}, forward: FORWARDS[forward]}.items():
        trainer = build(model_path, tmp_path, max_steps=3, **settings)
        calls = []
        trainer.model.register_forward_hook(lambda *call, calls=calls: calls.append(call))
        trainer.train()
        counts[name] = len(calls)
    assert counts == {"padded": 6, forward: 6 + 4}


def test_a_model_that_is_not_known_packed_runs_padded_and_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("trl_a3po.forward.packing_support.PACKABLE", ("qwen3",))
    path = save_tiny_model(tmp_path / "model")
    with caplog.at_level(logging.WARNING, training.__name__):
        trainer = build(path, tmp_path, max_steps=1)
        trainer.train()
    assert "run padded: model_type='llama' is not among those tested" in caplog.text
    assert logged(trainer, "a3po/forward/token_ratio") == [1.0]
    with pytest.raises(ValueError, match="packed_forward='on' cannot hold: model_type='llama'"):
        build(path, tmp_path, packed_forward="on")


def test_dropout_in_attention_is_refused(tmp_path):
    path = save_tiny_model(tmp_path / "model", attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1 is not applied"):
        build(path, tmp_path, packed_forward="on")


def test_another_attention_implementation_is_refused(model_path, tmp_path):
    settings = {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}}
    with pytest.raises(ValueError, match="attn_implementation='eager' is kept"):
        build(model_path, tmp_path, packed_forward="on", **settings)


def broken_pack(*inputs):
    """Positions that do not restart."""
    packed = training_pack(*inputs)
    vars(packed)["positions"] = torch.arange(packed.row.tokens)
    return packed


training_pack = training.pack


def test_a_forward_that_fails_its_check_is_not_used(model_path, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(training, "pack", broken_pack)
    with caplog.at_level(logging.WARNING, training.__name__):
        trainer, gradients = trained(model_path, tmp_path)
    assert "run padded: the self-check failed; packed: log-probs differ" in caplog.text
    assert_same_gradients(gradients, trained(model_path, tmp_path, packed_forward="off")[1])
    assert logged(trainer, "a3po/forward/token_ratio") == [1.0, 1.0]


def test_a_forward_that_fails_its_check_and_must_be_used_stops_the_run(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "pack", broken_pack)
    with pytest.raises(RuntimeError, match="packed_forward='on' cannot hold: the self-check failed"):
        trained(model_path, tmp_path, packed_forward="on")


def test_dropout_of_an_adapter_does_not_fail_the_check(model_path, tmp_path):
    peft_config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5)
    trainer = build(model_path, tmp_path, peft_config=peft_config, max_steps=1, packed_forward="on")
    trainer.train()
    assert logged(trainer, "a3po/forward/token_ratio")[0] > 1.0


def test_the_engine_and_checkpoints_get_the_configuration_of_the_user(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=1)
    install_packed_attention(trainer.model)  # as the first forward of a run does
    assert trainer.model.config._attn_implementation == PACKED
    assert policy_spec(trainer.model, torch.float32).config._attn_implementation == "sdpa"
    trainer.save_model(tmp_path / "saved")
    assert PACKED not in (tmp_path / "saved" / "config.json").read_text()


def test_a_class_of_the_users_own_is_run_padded():
    class Twisted(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    assert packing_refusal(LlamaForCausalLM(tiny_config())) is None
    assert packing_refusal(Twisted(tiny_config())).startswith("Twisted is not a class of transformers")
