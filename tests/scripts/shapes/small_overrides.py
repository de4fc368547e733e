"""A subclass that overrides a little of everything: the log, the rewards, the optimizer, the training step."""

import time

import torch
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


class MyTrainer(GRPOTrainer):
    def create_optimizer(self, *args, **kwargs):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.5)
        return self.optimizer

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list).clamp(max=1.5)

    def training_step(self, model, inputs, num_items_in_batch=None):
        began = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._metrics["train"]["my/seconds"].append(time.perf_counter() - began)
        return loss

    def log(self, logs, start_time=None):
        logs["my/lr"] = self._get_learning_rate()
        super().log(logs, start_time)


def main(model, folder):
    trainer = MyTrainer(model, length, args=GRPOConfig(output_dir=folder), train_dataset=prompts())
    trainer.train()
    return trainer
