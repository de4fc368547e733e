"""A trainer that holds every token of real servers against the weights of its version."""

from collections import deque

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from tests.runs import taken_groups
from trl_a3po import A3POConfig, A3POTrainer

STALENESS, LENGTH, TEMPERATURE = 2, 32, 0.8


class KeepVersions(TrainerCallback):
    """The trained weights of the newest `count` versions."""

    def __init__(self, count: int = STALENESS + 1):
        self.states = deque(maxlen=count)

    def keep(self, version, model):
        named = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self.states.append((version, named))

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.keep(state.global_step, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.keep(state.global_step, model)


class CheckingTrainer(A3POTrainer):
    """Holds every token's log-prob against the weights of its version, when its batch is taken."""

    def __init__(self, *args, versions: KeepVersions, callbacks=(), **kwargs):
        super().__init__(*args, callbacks=[versions, *callbacks], **kwargs)
        self.kept = versions
        self.groups = []  # with the version they were taken at
        self.own, self.other, self.later_parts = [], [], []
        self.stalest = self.spanning = 0

    def _take(self):
        rows = super()._take()
        now, states, groups = self.state.global_step, dict(self.kept.states), taken_groups(self)
        self.groups += [(now, group) for group in groups]
        rollouts = [(g.prompt.token_ids, r) for g in groups for r in g.rollouts]
        logps = {version: clean_logps(self.model, weights, rollouts) for version, weights in states.items()}
        for number, (_, rollout) in enumerate(rollouts):
            assert rollout.versions == sorted(rollout.versions)
            self.stalest = max(self.stalest, now - rollout.versions[0])
            self.spanning += rollout.versions[0] != rollout.versions[-1]
            for position, (version, logp) in enumerate(zip(rollout.versions, rollout.logps, strict=True)):
                gap = abs(logps[version][number][position] - logp)
                (self.own if version == rollout.versions[0] else self.later_parts).append(gap)
                self.other += [abs(theirs[number][position] - logp) for v, theirs in logps.items() if v != version]
        return rows

    def close(self):
        session = self._session
        super().close()
        if session is not None:
            self.outcomes = session.queue.outcomes()


@torch.no_grad()
def clean_logps(model, weights, rollouts) -> list[list[float]]:
    """Log-probs of every completion under `weights`, by one forward without a cache."""
    ids = [[*prompt, *rollout.token_ids] for prompt, rollout in rollouts]
    longest = max(map(len, ids))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    logits = torch.func.functional_call(model, dict(weights), (padded,), {"use_cache": False}).logits
    logps = (logits.float() / TEMPERATURE).log_softmax(-1)[:, :-1].gather(2, padded[:, 1:, None])[:, :, 0]
    return [
        row[len(prompt) - 1 : len(prompt) - 1 + len(rollout.token_ids)].tolist()
        for row, (prompt, rollout) in zip(logps, rollouts, strict=True)
    ]


def reward(completion_ids, **kwargs):
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def trainer_of(
    model, tmp_path, lora: bool, *callbacks, versions: KeepVersions | None = None, **settings
) -> CheckingTrainer:
    args = A3POConfig(
        output_dir=str(tmp_path / "run"),
        **{
            "engine": "vllm",
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "gradient_accumulation_steps": 1,
            "max_completion_length": LENGTH,
            "temperature": TEMPERATURE,
            "max_staleness": STALENESS,
            "max_steps": 8,
            "learning_rate": 1e-3 if lora else 2e-5,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "log_all_metrics": True,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "model_init_kwargs": {"dtype": "float32"},
            **settings,
        },
    )
    words = ["red", "blue", "green", "small", "large", "old", "new", "bright", "dark", "cold"]
    prompts = [f"The {words[i % 10]} and the {words[(3 * i + 1) % 10]} one: " for i in range(40)]
    return CheckingTrainer(
        model,
        reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if lora else None,
        versions=versions or KeepVersions(),
        callbacks=callbacks,
    )
