"""Methods that a subclass overrides, as scripts for GRPOTrainer do: followed, or refused with what to do instead."""

import logging

import pytest
import torch
from torch.utils.data import Sampler
from trl import GRPOTrainer

from tests.runs import (
    COMPLETE,
    GENERATIONS,
    RunsAhead,
    ScriptedGRPOTrainer,
    assert_same_gradients,
    build,
    logged,
    train_recorded,
)
from tests.tiny import tiny_prompts
from trl_a3po import A3POTrainer
from trl_a3po.testing import StubEngine

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("same_rows_in_each_micro_batch")]


# --- which rows -----------------------------------------------------------------------------------------------------


class EasyFirst(Sampler):
    """The last row first; every row for a whole group, and every batch for all of its micro-steps."""

    def __init__(self, trainer):
        self.groups = trainer.args.generation_batch_size // trainer.num_generations
        self.repeats = trainer.args.steps_per_generation * trainer.num_iterations
        self.rows = list(reversed(range(len(trainer.train_dataset))))
        self.rows = self.rows[: len(self.rows) // self.groups * self.groups]

    def __len__(self):
        return len(self.rows) * GENERATIONS * self.repeats

    def __iter__(self):
        for start in range(0, len(self.rows), self.groups):
            batch = [row for row in self.rows[start : start + self.groups] for _ in range(GENERATIONS)]
            yield from batch * self.repeats


def curriculum(trainer_class, sampler=EasyFirst):
    class Curriculum(trainer_class):
        def _get_train_sampler(self, dataset=None):
            return sampler(self)

    return Curriculum


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_iterations": 2}, {"train_dataset": tiny_prompts(7)}, {"gradient_accumulation_steps": 1}],
    ids=str,
)
def test_a_sampler_of_the_users_own_is_followed_over_epochs(model_path, tmp_path, settings):
    theirs = build(model_path, tmp_path, curriculum(ScriptedGRPOTrainer), max_steps=6, **settings)
    expected = train_recorded(theirs)
    engine = StubEngine(COMPLETE)
    mine = build(model_path, tmp_path, curriculum(A3POTrainer), max_steps=6, engine=engine, **settings)
    assert_same_gradients(train_recorded(mine), expected)
    prompts = [list(request.prompt_ids) for request in engine.requests]
    assert prompts == theirs.prompts_seen[::GENERATIONS][: len(prompts)]


class Plain(EasyFirst):
    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


class Short(EasyFirst):
    def __iter__(self):
        yield from list(super().__iter__())[:-1]


@pytest.mark.parametrize(
    "sampler, message", [(Plain, "num_generations=4 times"), (Short, "dataloader_drop_last=True")]
)
def test_a_sampler_without_whole_groups_or_batches_is_refused(model_path, tmp_path, sampler, message):
    settings = {"train_dataset": tiny_prompts(8), "max_steps": 6}  # the second epoch begins with step 5
    trainer = build(model_path, tmp_path, curriculum(A3POTrainer, sampler), **settings)
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.parametrize("name", ["get_train_dataloader", "get_batch_samples", "_remove_unused_columns"])
def test_a_method_that_the_queue_passes_over_is_refused(model_path, tmp_path, name):
    def method(self, *args, **kwargs):
        return getattr(super(Own, self), name)(*args, **kwargs)

    Own = type("Own", (A3POTrainer,), {name: method})
    with pytest.raises(ValueError, match=f"Own.{name} would be ignored.*_get_train_sampler"):
        build(model_path, tmp_path, Own)
    trainer = build(model_path, tmp_path)
    setattr(trainer, name, lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=f"A3POTrainer.{name} would be ignored"):
        trainer.train()


# --- the batch ------------------------------------------------------------------------------------------------------


def again(self, inputs):
    super(Again, self)._generate_and_score_completions(inputs)
    return super(Again, self)._generate_and_score_completions(inputs)


def own_rewards(self, inputs, prompts, completions, completion_ids_list):
    return torch.rand(len(inputs), 1)


def own_turn(self, prompt_ids, *args, **kwargs):
    return [[5, 6] for _ in prompt_ids], [[-1.0, -1.0] for _ in prompt_ids]


def shortened(self, prompt_ids, *args, **kwargs):
    ids, logps = super(Shortened, self)._generate_single_turn(prompt_ids, *args, **kwargs)
    return [tokens[:1] for tokens in ids], [values[:1] for values in logps]


def own_inputs(self, generation_batch):
    return GRPOTrainer._prepare_inputs(self, generation_batch)


def subclass(name, **methods):
    return type(name, (A3POTrainer,), methods)


Again = subclass("Again", _generate_and_score_completions=again)
Shortened = subclass("Shortened", _generate_single_turn=shortened)


@pytest.mark.parametrize(
    "trainer_class, message",
    [
        (Again, "called again.*drop_zero_variance_groups=True, or pass an on_group"),
        (subclass("Own", _calculate_rewards=own_rewards), r"_calculate_rewards does not call super\(\).*reward_funcs"),
        (subclass("Own", _generate_single_turn=own_turn), "Pass an engine of your own"),
        (Shortened, "changed the completions of the engine.*on_group"),
        (subclass("Own", _prepare_inputs=own_inputs), r"_prepare_inputs does not call super\(\)"),
    ],
    ids=["sampled again", "rewards", "completions", "fewer tokens", "batch"],
)
def test_an_override_that_leaves_the_engines_batch_is_refused(model_path, tmp_path, trainer_class, message):
    trainer = build(model_path, tmp_path, trainer_class)
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert not logged(trainer, "loss")


def test_rewards_that_a_subclass_shapes_train_as_in_grpo(model_path, tmp_path):
    def shaped(trainer_class):
        class Shaped(trainer_class):
            def _calculate_rewards(self, *args):
                return super()._calculate_rewards(*args) ** 2

        return Shaped

    expected = train_recorded(build(model_path, tmp_path, shaped(ScriptedGRPOTrainer)))
    assert_same_gradients(train_recorded(build(model_path, tmp_path, shaped(A3POTrainer))), expected)


# --- the loss -------------------------------------------------------------------------------------------------------


def own_loss(self, model, inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].size(1)
    logps = self._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
    old = self.anchor(inputs)
    ratio = torch.exp(logps - (logps.detach() if old is None else old))
    self.ratios = [*getattr(self, "ratios", []), ratio.detach()[inputs["completion_mask"].bool()]]
    weighted = ratio * inputs["advantages"].unsqueeze(1) * inputs["completion_mask"]
    return -weighted.sum() / inputs["completion_mask"].sum()


def with_own_loss(anchor, trainer_class=A3POTrainer):
    return type("Mine", (trainer_class,), {"_compute_loss": own_loss, "anchor": staticmethod(anchor)})


def stale_trainer(model, folder, trainer_class, **settings):
    settings = {"max_staleness": 2, "gradient_accumulation_steps": 1, "max_steps": 6, **settings}
    trainer = build(model, folder, trainer_class, **settings)
    trainer.add_callback(RunsAhead(trainer, 2))
    return trainer


@pytest.mark.parametrize("settings", [{}, {"proximal_method": "recompute"}], ids=str)
def test_an_own_loss_gets_the_log_probs_of_the_policy_that_sampled(model_path, tmp_path, caplog, settings):
    def anchor(inputs):
        old = inputs.get("old_per_token_logps")
        assert torch.equal(old, inputs["sampling_per_token_logps"])
        return old

    trainer = stale_trainer(model_path, tmp_path, with_own_loss(anchor), **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert (torch.cat(trainer.ratios) - 1).abs().max() > 0.01
    assert len([r for r in caplog.records if "trains a loss of its own" in r.getMessage()]) == 1


def test_an_own_loss_without_a_correction_is_refused_where_tokens_are_stale(model_path, tmp_path):
    trainer = stale_trainer(model_path, tmp_path, with_own_loss(lambda inputs: None))
    with pytest.raises(ValueError, match=r"The loss of Mine reads neither.*super\(\)._compute_loss"):
        trainer.train()


def test_an_own_loss_trains_as_in_grpo_where_no_token_is_stale(model_path, tmp_path):
    theirs = build(model_path, tmp_path, with_own_loss(lambda inputs: None, ScriptedGRPOTrainer))
    mine = build(model_path, tmp_path, with_own_loss(lambda inputs: None))
    assert_same_gradients(train_recorded(mine), train_recorded(theirs))


@pytest.mark.parametrize("shape", ["(B, T)", "(B, 1)"])
def test_advantages_per_token_train_as_in_grpo(model_path, tmp_path, shape):
    def per_token(trainer_class):
        class PerToken(trainer_class):
            def _compute_loss(self, model, inputs):
                advantages = inputs["advantages"].unsqueeze(1)
                if shape == "(B, T)":
                    advantages = advantages * torch.linspace(0.5, 1.5, inputs["completion_ids"].shape[1])
                return super()._compute_loss(model, {**inputs, "advantages": advantages})

        return PerToken

    expected = train_recorded(build(model_path, tmp_path, per_token(ScriptedGRPOTrainer)))
    assert_same_gradients(train_recorded(build(model_path, tmp_path, per_token(A3POTrainer))), expected)


@pytest.mark.parametrize("name", ["advantages", "old_per_token_logps"])
def test_a_trl_that_reads_the_objectives_values_too_early_is_noticed(model_path, tmp_path, monkeypatch, name):
    real = GRPOTrainer._compute_loss

    def early(self, model, inputs):
        inputs[name]
        return real(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", early)
    with pytest.raises(RuntimeError, match=f"The loss read '{name}' before it asked for the log-probs"):
        build(model_path, tmp_path).train()
