"""`A3POTrainer` with its own engine process, on a tiny model: what the engine says of each token is true."""

import math

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.runs import RunsAhead, TakeRecorder
from tests.tiny import save_tiny_model, tiny_prompts
from trl_a3po import A3POConfig
from trl_a3po.testing import completion_logps


class KeepVersions(TrainerCallback):
    """The weights of every policy version, merged into a plain model's state dict."""

    def __init__(self):
        self.states = {}

    def keep(self, version, model):
        self.states[version] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.keep(state.global_step, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.keep(state.global_step, model)


def reward(completion_ids, **kwargs):
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def train(tmp_path, *, peft_config=None, **settings):
    versions = KeepVersions()
    settings = {"kv_on_publish": "recompute", "max_steps": 8, "learning_rate": 0.02, **settings}
    args = A3POConfig(
        log_all_metrics=True,
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=24,
        max_staleness=3,
        engine_slots=4,
        engine_threads=1,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **settings,
    )
    trainer = TakeRecorder(
        save_tiny_model(tmp_path / "model"),
        reward,
        args=args,
        train_dataset=tiny_prompts(),
        peft_config=peft_config,
        callbacks=[versions],
    )
    if args.schedule == "async" and args.max_steps > 3:
        trainer.add_callback(RunsAhead(trainer, 4))  # so the next two batches are of version 0
    trainer.train()
    return trainer, versions.states


@pytest.mark.parametrize(
    "lora", [pytest.param(False, id="full", marks=pytest.mark.long), pytest.param(True, id="lora")]
)
def test_log_probs_are_those_of_the_stamped_version(tmp_path, lora):
    peft_config = LoraConfig(r=4, target_modules="all-linear") if lora else None
    trainer, states = train(tmp_path, peft_config=peft_config)
    model = trainer.accelerator.unwrap_model(trainer.model)
    per_version, stalest, worst_own, other = {}, 0, 0.0, []
    for taken_at, group in trainer.groups:
        for rollout in group.rollouts:
            assert rollout.versions == sorted(rollout.versions)
            assert all(taken_at - 3 <= version <= taken_at for version in rollout.versions)
            stalest = max(stalest, taken_at - min(rollout.versions))
            for version in set(rollout.versions):
                per_version.setdefault(version, []).append((group.prompt.token_ids, rollout))
    assert stalest >= 2 and len(per_version) >= 4
    last = max(states)
    for version, rows in per_version.items():
        for state, gaps in ((version, []), (last if version < last - 1 else 0, other)):
            model.load_state_dict(states[state])
            for prompt_ids, rollout in rows:
                clean = completion_logps(model, prompt_ids, rollout.token_ids, 1.0)
                mine = torch.tensor([v == version for v in rollout.versions])
                gaps.append((clean - torch.tensor(rollout.logps))[mine].abs().max().item())
            if state == version:
                worst_own = max(worst_own, *gaps)
    assert worst_own < 1e-4
    assert sum(other) / len(other) > 1e-2


def test_every_group_ends_in_one_outcome_and_training_changes_the_policy(tmp_path):
    trainer, states = train(tmp_path, kv_on_publish="keep")
    assert sorted(group.prompt.index for _, group in trainer.groups) == list(range(16))
    assert any(not torch.equal(states[0][name], states[8][name]) for name in states[0])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8 and all(math.isfinite(loss) for loss in losses)


@pytest.mark.long
def test_merged_lora_weights_serve_the_same_policy(tmp_path):
    trainer, _ = train(
        tmp_path, peft_config=LoraConfig(r=4, target_modules="all-linear"), lora_sync="merged", schedule="sync"
    )
    gaps = [
        entry["a3po/rho/max"] - entry["a3po/rho/min"] for entry in trainer.state.log_history if "a3po/rho/max" in entry
    ]
    assert len(gaps) == 8 and max(gaps) < 1e-4  # fresh tokens: the trainer's log-probs are the engine's


@pytest.mark.long
def test_a_saved_adapter_loads_again(tmp_path):
    trainer, _ = train(tmp_path, peft_config=LoraConfig(r=4, target_modules="all-linear"), max_steps=2)
    trainer.save_model(str(tmp_path / "adapter"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.load_adapter(str(tmp_path / "adapter"))
    assert torch.isfinite(model(torch.tensor([[3, 4]])).logits).all()
