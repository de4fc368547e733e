"""The plan says what the run will do."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from tests.tiny import save_tiny_model, tiny_config, tiny_prompts
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.models.attention_shape import kv_values_per_token
from trl_a3po.models.memory import LayerShape, optimizer_bytes
from trl_a3po.objectives.table import OBJECTIVES
from trl_a3po.report.trainer_plan import trainer_plan
from trl_a3po.testing import StubEngine


def config(**settings):
    base = {"output_dir": "unused", "per_device_train_batch_size": 8, "num_generations": 4, "report_to": "none"}
    return A3POConfig(**{**base, "use_cpu": True, **settings})


def test_the_plan_names_batch_steps_bound_and_engine():
    plan = config(gradient_accumulation_steps=2, num_iterations=2, max_staleness=6, weight_sync_steps=2).plan()
    for words in (
        "4 prompts x 4 completions (B = 4)",
        "K = 2 (2 iterations)",
        "async, at most 6 optimizer steps stale",
        "up to 3 batches (12 prompts)",
        "when 2 optimizer steps old",
        "decoupled, proximal policy loglinear",
        "transformers",
    ):
        assert words in plan, plan


def objective_line(objective):
    needs = {"loss_type": "grpo", "scale_rewards": "none"}  # of some, allowed by all
    if objective == "masked_is":
        needs["proximal_method"] = "reuse"
    (line,) = re.findall("^objective: +(.+)$", config(objective=objective, **needs).plan(), re.M)
    return line


def test_every_objective_has_a_line_of_its_own():
    lines = {objective: objective_line(objective) for objective in OBJECTIVES}
    assert all(line.startswith(f"{objective}, ") for objective, line in lines.items())
    details = {line.removeprefix(objective) for objective, line in lines.items()}
    assert len(details) == len(lines)


def test_the_plan_of_a_fixed_lag_promises_exactly_that():
    plan = config(schedule="fixed_lag", max_staleness=3).plan()
    assert "fixed_lag, exactly 3 optimizer steps stale" in plan
    assert "at the start of every batch" in plan


def test_the_cache_is_counted_as_the_model_allocates_it():
    model = AutoModelForCausalLM.from_config(tiny_config())
    cache = model(torch.tensor([[3, 4, 5]]), use_cache=True).past_key_values
    allocated = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert kv_values_per_token(model.config) * 3 == allocated


def test_memory_counts_trained_parameters_only():
    model = AutoModelForCausalLM.from_config(tiny_config(hidden_size=512, vocab_size=2**16), dtype=torch.float32)
    frozen = trainer_plan(config(), model.requires_grad_(False), 4, 4, "padded")
    trained = trainer_plan(config(), model.requires_grad_(True), 4, 4, "padded")
    assert "gradients 0.00 GiB" in frozen and "gradients 0.00 GiB" not in trained


def test_frozen_weights_that_the_engine_reads_where_they_are_are_not_counted_twice():
    model = AutoModelForCausalLM.from_config(tiny_config(hidden_size=512, vocab_size=2**16), dtype=torch.float32)
    model.requires_grad_(False)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    alone = trainer_plan(config(), model, 4, 4, "padded")
    shared = trainer_plan(config(), model, 4, 4, "padded", shared_bytes=size)
    assert f"engine memory:           {size / 2**30:.2f} GiB" in alone
    assert "engine memory:           0.01 GiB" in shared  # the cache
    assert f"of which {size / 2**30:.2f} GiB are the trainer's own frozen weights" in shared


def test_the_plan_says_what_training_waits_for_at_a_publish():
    model = AutoModelForCausalLM.from_config(tiny_config())
    on_cpu = "training waits until the weights are in memory that the engine reads"
    assert on_cpu in trainer_plan(config(), model, 4, 4, "padded")
    assert "publishing" not in trainer_plan(
        config(engine=StubEngine(lambda prompt, number: (1,))), model, 4, 4, "padded"
    )


@pytest.mark.parametrize(
    ("settings", "forward"),
    [
        ({}, "packed, prompts shared where that is cheaper, attention by SDPA (no CUDA device)"),
        ({"shared_prompt": "off"}, "packed, prompts shared never"),
        ({"packed_forward": "off"}, "padded: packed_forward='off'"),
    ],
)
def test_the_plan_names_the_training_forward(tmp_path, settings, forward):
    args = config(max_completion_length=32, model_init_kwargs={"dtype": "float32"}, **settings)
    args.output_dir = str(tmp_path / "run")
    model = save_tiny_model(tmp_path / "model")
    trainer = A3POTrainer(model, lambda **kwargs: [], args=args, train_dataset=tiny_prompts())
    assert f"training forward:        {forward}" in trainer.plan()


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path, capsys):
    args = config(dry_run=True, max_steps=4, max_completion_length=32, model_init_kwargs={"dtype": "float32"})
    args.output_dir = str(tmp_path / "run")
    model = save_tiny_model(tmp_path / "model")
    trainer = A3POTrainer(model, lambda **kwargs: [], args=args, train_dataset=tiny_prompts())
    assert trainer.train().global_step == 0
    assert "trainer memory" in capsys.readouterr().out


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_states_of_an_optimizer_are_counted_as_it_allocates_them(optim, dtype):
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=dtype)
    make, options = Trainer.get_optimizer_cls_and_kwargs(config(optim=optim))
    optimizer = make(model.parameters(), **options)
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    numbers = sum(p.numel() for p in model.parameters())
    allocated = sum(value.nbytes for value in states if torch.is_tensor(value))
    assert numbers * optimizer_bytes(optim, dtype.itemsize) == allocated


def test_states_that_are_not_known_are_named():
    model = AutoModelForCausalLM.from_config(tiny_config())
    assert "and the states of MyOptimizer, which are not known" in trainer_plan(
        config(), model, 4, 4, "padded", optimizer="MyOptimizer"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_a_forward_pass_keeps(dtype, checkpointing):
    """Within 20 %: what a backward pass adds while it repeats one layer is left out here."""
    shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    model = AutoModelForCausalLM.from_config(tiny_config(**shape), dtype=dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    parameters, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, or another tensor would take its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logps = model(torch.full((4, 128), 5), use_cache=False).logits.float().log_softmax(-1)
    measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in parameters)
    size = LayerShape.of(model.config)
    estimate = size.activation_bytes(4 * 128, dtype.itemsize, checkpointing=checkpointing)
    if checkpointing:
        whole = size.activation_bytes(4 * 128, dtype.itemsize, checkpointing=False)
        logits = logps.nbytes * (dtype.itemsize + 4) // 4
        estimate -= (whole - logits) // size.layers
    assert estimate == pytest.approx(measured, rel=0.2)
