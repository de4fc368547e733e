"""An entropy bonus on top of the loss, and its value among the metrics."""

import torch
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


class EntropyBonusTrainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, inputs["prompt_ids"].size(1) - 1 : -1]
        logps = logits.log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        bonus = (entropy * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()
        self._metrics["train"]["entropy_bonus"].append(bonus.item())
        return loss - 0.1 * bonus


def main(model, folder):
    trainer = EntropyBonusTrainer(model, length, args=GRPOConfig(output_dir=folder), train_dataset=prompts())
    trainer.train()
    return trainer
