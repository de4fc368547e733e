"""A REINFORCE loss of the script's own, with the importance ratio of `old_per_token_logps`."""

import torch
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


class ReinforceTrainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kept = inputs["completion_mask"]
        logps = self._get_per_token_logps_and_entropies(model, ids, mask, kept.size(1))[0]
        old = inputs.get("old_per_token_logps")
        ratio = torch.exp(logps - (logps.detach() if old is None else old))
        return -(ratio * inputs["advantages"].unsqueeze(1) * kept).sum() / kept.sum()


def main(model, folder):
    trainer = ReinforceTrainer(model, length, args=GRPOConfig(output_dir=folder), train_dataset=prompts())
    trainer.train()
    return trainer
