"""A callback that samples from the policy after every step, and one that counts what it sees."""

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


class LogSamples(TrainerCallback):
    def __init__(self):
        self.samples = []

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        model.eval()
        inputs = processing_class("w1 w2", return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        model.train()
        self.samples.append(processing_class.decode(tokens[0]))


class Count(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1]["logged_keys"] = sum(not name.startswith("a3po/") for name in logs)


def main(model, folder):
    samples = LogSamples()
    trainer = GRPOTrainer(
        model, length, args=GRPOConfig(output_dir=folder), train_dataset=prompts(), callbacks=[samples, Count()]
    )
    trainer.train()
    assert len(samples.samples) == 3
    return trainer
