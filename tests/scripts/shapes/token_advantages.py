"""A loss in the shape of GTPO's: advantages per token, larger where the policy is uncertain."""

import torch
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


class TokenAdvantageTrainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            _, entropies = self._get_per_token_logps_and_entropies(
                model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True
            )[:2]
        share = entropies / entropies.sum(dim=1, keepdim=True).clamp(min=1e-6) * entropies.size(1)
        return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"].unsqueeze(1) * share})


def main(model, folder):
    trainer = TokenAdvantageTrainer(model, length, args=GRPOConfig(output_dir=folder), train_dataset=prompts())
    trainer.train()
    return trainer
