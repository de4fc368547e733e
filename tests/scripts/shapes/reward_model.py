"""A reward model beside a function: a network for classification with one label, and its own tokenizer."""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts
from tests.tiny import tiny_config


def main(model, folder):
    torch.manual_seed(5)
    judge = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1), dtype=torch.float32)
    trainer = GRPOTrainer(
        model,
        reward_funcs=[judge, length],
        reward_processing_classes=[AutoTokenizer.from_pretrained(model), None],
        args=GRPOConfig(output_dir=folder),
        train_dataset=prompts(),
    )
    trainer.train()
    return trainer
