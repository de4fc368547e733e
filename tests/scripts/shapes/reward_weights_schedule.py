"""A callback that changes the weights of the rewards and the learning rate while training goes on."""

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import contains_answer, length, prompts


class Anneal(TrainerCallback):
    trainer = None

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.trainer.reward_weights = torch.tensor([1.0, 1.0 / (1 + state.global_step)])
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        control.should_evaluate = control.should_save = state.global_step == 2


def main(model, folder):
    anneal = Anneal()
    trainer = GRPOTrainer(
        model,
        [contains_answer, length],
        args=GRPOConfig(output_dir=folder),
        train_dataset=prompts(),
        eval_dataset=prompts(2, first=30),
        callbacks=[anneal],
    )
    anneal.trainer = trainer
    trainer.train()
    return trainer
