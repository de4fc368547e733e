"""What a run does to the user's objects: nothing beyond training the parameters, so that a notebook's cell can be run
again, with the same model."""

import contextlib
import copy
import gc
import json
import pickle
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.runs import ScriptedGRPOTrainer, build, reward
from tests.tiny import tiny_prompts, tiny_tokenizer
from trl_a3po import A3POConfig, A3POTrainer

pytestmark = pytest.mark.long


def load(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)


def traces(model) -> dict:
    """Everything of a model but the values of its parameters."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return {
        "config": inner.config.to_dict(),
        "attention": inner.config._attn_implementation,
        "generation": inner.generation_config.to_dict(),
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {
            name: [
                {hook.__qualname__ for hook in hooks.values()}
                for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            ]
            for name, module in model.named_modules()
        },
        "forwards": {name: module.forward.__func__.__qualname__ for name, module in model.named_modules()},
        "trained": {name: (p.requires_grad, p.dtype, p.data_ptr()) for name, p in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_leaves_on_a_model_what_grpo_leaves(model_path, tmp_path, adapter):
    left = {}
    for trainer_class in (ScriptedGRPOTrainer, A3POTrainer):
        model = load(model_path)
        if adapter:
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        trainer = build(model, tmp_path, trainer_class, max_steps=2, processing_class=tiny_tokenizer())
        trainer.train()
        left[trainer_class] = traces(model)
    ours, theirs = left[A3POTrainer], left[ScriptedGRPOTrainer]
    for values in (ours, theirs):
        values["buffers"] = {name: buffer.tolist() for name, buffer in values["buffers"].items()}
        values["trained"] = {name: value[:2] for name, value in values["trained"].items()}
    assert ours == theirs


@pytest.mark.parametrize("adapter", [False, True])
def test_a_forward_pass_calls_no_more_hooks_after_many_batches_than_after_one(model_path, tmp_path, adapter):
    """TRL turns checkpointing off and on again for each batch, and transformers adds a hook each time."""
    counts = []
    for steps in (1, 5):
        model = load(model_path)
        if adapter:
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        build(model, tmp_path, max_steps=steps, processing_class=tiny_tokenizer()).train()
        hooks = model.get_input_embeddings()._forward_hooks
        assert any("require" in hook.__qualname__ for hook in hooks.values())
        counts.append(len(hooks))
    assert counts[0] == counts[1]


def test_a_run_leaves_tokenizer_dataset_and_arguments_as_they_were(model_path, tmp_path):
    tokenizer, dataset = tiny_tokenizer(), tiny_prompts()
    trainer = build(
        load(model_path), tmp_path, max_steps=2, max_staleness=2, processing_class=tokenizer, train_dataset=dataset,
        eval_dataset=tiny_prompts(4), eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    settings = trainer.args.to_dict()
    rows, fingerprint, words = dataset[:], dataset._fingerprint, copy.deepcopy(vars(tokenizer))
    trainer.train()
    assert trainer.args.to_dict() == settings
    assert (dataset[:], dataset._fingerprint) == (rows, fingerprint)
    assert vars(tokenizer).keys() == words.keys()
    assert all(value == words[name] for name, value in vars(tokenizer).items() if name != "_tokenizer")


@pytest.mark.parametrize("again", ["the same", "pickled", "another of its configuration", "after an evaluation"])
def test_a_model_can_be_trained_again(model_path, tmp_path, again):
    model = load(model_path)
    first = build(
        model, tmp_path, max_steps=2, processing_class=tiny_tokenizer(), eval_dataset=tiny_prompts(4),
        gradient_checkpointing=False,  # its hook cannot be pickled
    )  # fmt: skip
    first.train()
    if again == "after an evaluation":
        first.evaluate()
    elif again == "pickled":
        model = pickle.loads(pickle.dumps(model))
    elif again == "another of its configuration":
        model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    assert model.config._attn_implementation == "sdpa"
    trainer = build(model, tmp_path, max_steps=2, processing_class=tiny_tokenizer())
    trainer.train()
    assert trainer.state.global_step == 2 and trainer._training_forward.refusal is None


def test_what_a_training_has_put_around_the_model_is_not_kept(model_path, tmp_path):
    """Such as DDP's wrapper, which holds as much as the gradients, and which the next training makes anew."""
    trainer = build(model_path, tmp_path)
    wrapper = torch.nn.Sequential(trainer.model)
    seen = weakref.ref(wrapper)
    trainer._training_forward._inner(wrapper)
    trainer._training_forward.release()
    del wrapper
    gc.collect()
    assert seen() is None


def test_a_model_of_a_run_that_was_killed_can_be_trained(model_path, tmp_path):
    model = load(model_path)
    first = build(model, tmp_path, max_steps=2, processing_class=tiny_tokenizer())
    first._training_forward.release = lambda: None  # as if it had not come to its end
    first.train()
    assert model.config._attn_implementation != "sdpa"
    build(model, tmp_path, max_steps=2, processing_class=tiny_tokenizer()).train()
    assert model.config._attn_implementation == "sdpa"


def test_a_reward_that_runs_the_policy_gets_all_of_its_logits(model_path, tmp_path):
    shapes = []

    def certainty(completion_ids, target, **kwargs):
        with torch.no_grad():
            for ids in completion_ids * 8:
                shapes.append((len(ids), trainer.model(input_ids=torch.tensor([ids])).logits.shape[1]))
        return reward(completion_ids, target)

    trainer = build(model_path, tmp_path, max_steps=12, max_staleness=4, reward_funcs=certainty)
    trainer.train()
    assert shapes and all(asked == got for asked, got in shapes)


def test_a_reward_cannot_change_the_mode_of_training(model_path, tmp_path):
    modes = []

    class Recorded(A3POTrainer):
        def _compute_loss(self, model, inputs):
            modes.append(model.training)
            return super()._compute_loss(model, inputs)

    def toggles(completion_ids, target, **kwargs):
        trainer.model.eval()
        time.sleep(0.01)
        trainer.model.train()
        return reward(completion_ids, target)

    trainer = build(model_path, tmp_path, Recorded, max_steps=8, max_staleness=4, reward_funcs=toggles)
    trainer.train()
    assert modes == [True] * 16
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 8 and not any(name.startswith("eval_") for entry in logged for name in entry)
    assert "train" not in vars(trainer.model)
    assert trainer.model.eval().training is False


class CopiesThePolicy(TrainerCallback):
    """As a moving average of the weights is made."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            self.copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            for copied in self.copies:
                copied.eval()
            self.modes = [model.training, *(copied.training for copied in self.copies)]


def test_a_copy_of_the_policy_has_a_mode_of_its_own(model_path, tmp_path):
    averaging = CopiesThePolicy()
    trainer = build(model_path, tmp_path, max_steps=2, callbacks=[averaging], gradient_checkpointing=False)
    trainer.train()
    assert averaging.modes == [True, False, False]
    assert len([entry for entry in trainer.state.log_history if "reward" in entry]) == 2
    assert trainer.model.training and not averaging.copies[0].train(False).training
    assert trainer.model.training


class TrainsTheSameModel(TrainerCallback):
    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            build(model, self.folder / "inner", max_steps=1, processing_class=tiny_tokenizer()).train()


def test_another_run_of_the_model_in_the_middle_of_a_run_leaves_it_to_the_first(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=2, callbacks=[TrainsTheSameModel(tmp_path)])
    trainer.train()
    assert trainer.state.global_step == 2 and "train" not in vars(trainer.model)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_configuration_has_the_engine_of_the_configuration(model_path, tmp_path, duplicate):
    args = build(model_path, tmp_path).args
    copied = duplicate(args)
    assert copied.engine is args.engine and copied is not args
    assert copied.to_dict() == args.to_dict() and vars(copied).keys() == vars(args).keys()
    copied.max_steps = 99
    assert args.max_steps != 99


def test_a_pickled_configuration_without_its_engine_is_refused(model_path, tmp_path):
    args = pickle.loads(pickle.dumps(build(model_path, tmp_path).args))
    with pytest.raises(ValueError, match=r"engine='StubEngine' is not known.*not part of a pickled configuration"):
        A3POTrainer(model_path, reward, args=args, train_dataset=tiny_prompts())


def test_a_configuration_with_an_engine_object_is_written_as_json(model_path, tmp_path):
    assert json.loads(build(model_path, tmp_path).args.to_json_string())["engine"] == "StubEngine"


def test_to_dict_leaves_the_arguments_as_they_are(tmp_path):
    """`TrainingArguments.to_dict`, which trackers call, writes the names of dtypes into `model_init_kwargs`."""
    args = A3POConfig(output_dir=str(tmp_path), model_init_kwargs={"dtype": torch.float64, "a": {"dtype": torch.int8}})
    assert args.to_dict()["model_init_kwargs"] == {"dtype": "float64", "a": {"dtype": "int8"}}
    assert args.model_init_kwargs == {"dtype": torch.float64, "a": {"dtype": torch.int8}}


def test_a_reward_that_changes_the_working_folder_moves_no_checkpoint(model_path, tmp_path, monkeypatch):
    stays = threading.Lock()  # cannot be sent to a process, so the function stays in the thread

    def elsewhere(completion_ids, target, **kwargs):
        with stays, tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            time.sleep(0.05)
        return reward(completion_ids, target)

    monkeypatch.chdir(tmp_path)
    trainer = build(
        model_path, Path("run"), max_steps=4, max_staleness=2, reward_funcs=elsewhere,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    found = sorted(path.name for path in (tmp_path / "run" / "A3POTrainer").glob("checkpoint-*"))
    assert found == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_without_anything_to_train_is_refused(model_path, tmp_path, adapter):
    model = load(model_path)
    if adapter:
        get_peft_model(load(model_path), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
        model = PeftModel.from_pretrained(model, tmp_path / "a")
    else:
        model.requires_grad_(False)
    with pytest.raises(ValueError, match="is_trainable=True" if adapter else "model.requires_grad_"):
        build(model, tmp_path, processing_class=tiny_tokenizer(), gradient_checkpointing=False)
