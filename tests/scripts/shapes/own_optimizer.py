"""An optimizer and a scheduler of the script's own, with two groups of parameters."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    policy = AutoModelForCausalLM.from_pretrained(model)
    embeddings = [p for name, p in policy.named_parameters() if "embed" in name]
    others = [p for name, p in policy.named_parameters() if "embed" not in name]
    optimizer = torch.optim.AdamW([{"params": embeddings, "lr": 1e-4}, {"params": others, "lr": 1e-3}], eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = GRPOTrainer(
        policy,
        length,
        args=GRPOConfig(output_dir=folder),
        train_dataset=prompts(),
        processing_class=AutoTokenizer.from_pretrained(model),
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    return trainer
