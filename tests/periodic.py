"""Runs in float64 of `schedule="periodic"`, with groups finished in random orders, and of what it must equal."""

import random
import time

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trl import GRPOTrainer

from tests.runs import COMPLETE, GENERATIONS, build, train_recorded
from tests.tiny import WORDS
from trl_a3po import A3POTrainer
from trl_a3po.testing import StubEngine

GROUPS, MICRO_STEPS = 6, 3  # a period: three micro-steps of two groups each


class ShufflingEngine(StubEngine):
    """Finishes groups in a random order, and no more of them than takes have asked for."""

    def __init__(self, seed: int, complete=COMPLETE):
        super().__init__(complete)
        self._order = random.Random(seed)
        self.asked_for = 0

    def wait(self, timeout):
        with self._lock:
            if self._events and self.asked_for:
                self.asked_for -= 1
                return [self._events.pop(self._order.randrange(len(self._events)))]
        time.sleep(min(timeout, 0.001))
        return []


class TakesRecorder(A3POTrainer):
    """The prompts of every micro-step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.taken: list[list[int]] = []

    def _take(self):
        if isinstance(self.args.engine, ShufflingEngine):
            self.args.engine.asked_for += self.args.groups_per_take
        rows = super()._take()
        self.taken.append(sorted({group.prompt.index for group, _ in self._current_batch.rows}))
        return rows


def prompts_of_one_length(rows: int = 32) -> Dataset:
    prompts = [f"{WORDS[i]} {WORDS[(5 * i + 1) % len(WORDS)]} {WORDS[(3 * i + 2) % len(WORDS)]}" for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "target": list(range(rows))})


def exact_reward(completion_ids, target, **kwargs):
    """In eighths: TRL's float32 statistics of a group are then the same in whatever tensor it lies."""
    return [(sum(ids) + t) % 8 / 8 for ids, t in zip(completion_ids, target, strict=True)]


def float64_throughout(set_attribute=setattr) -> None:
    """The model's norm and TRL's head compute in float32 otherwise, and another order then moves gradients by 1e-9."""

    def norm(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def logps(self, model, input_ids, attention_mask, logits_to_keep, *args, compute_entropy=False, **kwargs):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = (logits / self.temperature).log_softmax(-1)
        chosen = logps.gather(2, input_ids[:, -logits_to_keep:, None])[..., 0]
        return chosen, -(logps.exp() * logps).sum(-1).detach() if compute_entropy else None, None

    set_attribute(LlamaRMSNorm, "forward", norm)
    set_attribute(GRPOTrainer, "_get_per_token_logps_and_entropies", logps)


def trained(model_path, folder, schedule="periodic", lora=False, trainer_class=TakesRecorder, processes=1, **settings):
    """`(trainer, clipped gradients of each step)` of a float64 run; `processes` share its micro-steps."""
    trainer = build(
        model_path,
        folder,
        trainer_class,
        **{
            "reward_funcs": exact_reward,
            "schedule": schedule,
            "per_device_train_batch_size": GROUPS // MICRO_STEPS * GENERATIONS // processes,
            "gradient_accumulation_steps": MICRO_STEPS,
            "max_steps": 2,
            "model_init_kwargs": {"dtype": torch.float64},
            "packed_forward": "off",
            "max_grad_norm": 0.05,  # always clipped
            "peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None,
            **settings,
        },
    )
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.double()
    return trainer, train_recorded(trainer)
