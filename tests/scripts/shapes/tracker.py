"""A tracker in the shape of wandb's callback: it sets itself up once, keeps the arguments and the model's config, and
receives every log."""

import json

from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


class Tracker(TrainerCallback):
    def __init__(self):
        self.config, self.rows, self.finished = None, [], False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.config = json.dumps({**args.to_sanitized_dict(), **model.config.to_dict()}, default=str)

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        self.rows.append({f"train/{name}": value for name, value in logs.items()} | {"step": state.global_step})

    def on_train_end(self, args, state, control, **kwargs):
        self.finished = True


def main(model, folder):
    tracker = Tracker()
    trainer = GRPOTrainer(model, length, args=GRPOConfig(output_dir=folder), train_dataset=prompts())
    trainer.add_callback(tracker)
    trainer.train()
    assert tracker.finished and "hidden_size" in tracker.config
    assert [row["step"] for row in tracker.rows] == [1, 2, 3, 3]
    assert all("train/reward" in row for row in tracker.rows[:3])
    return trainer
