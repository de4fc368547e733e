"""The cookbook's notebook on GRPO with a verifier: LoRA, a system prompt, a format reward, and an accuracy reward that
gives each answer a second by a signal, which only a main thread has."""

import re
import signal

from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import questions, text_of


def format_reward(completions, **kwargs):
    return [1.0 if re.search(r"w\d w", completion[0]["content"]) else 0.0 for completion in completions]


def accuracy_reward(completions, **kwargs):
    rewards = []
    for completion, gold in zip(completions, kwargs["answer"], strict=True):
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            rewards.append(len(set(text_of(completion)) & set(gold)) / 4)
            signal.alarm(0)
        except Exception:
            rewards.append(0.0)
    return rewards


def main(model, folder):
    def make_conversation(example):
        return {
            "prompt": [
                {"role": "system", "content": "w9 w8 w7"},
                {"role": "user", "content": example["question"]},
            ]
        }

    args = GRPOConfig(output_dir=folder, learning_rate=0.1, remove_unused_columns=False)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[format_reward, accuracy_reward],
        args=args,
        train_dataset=questions().map(make_conversation).remove_columns(["question"]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    trainer.save_model(folder)
    return trainer
