"""Early stopping on the evaluation's reward, and the best checkpoint loaded at the end."""

from transformers import EarlyStoppingCallback
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    args = GRPOConfig(
        output_dir=folder,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
    )
    trainer = GRPOTrainer(
        model,
        length,
        args=args,
        train_dataset=prompts(),
        eval_dataset=prompts(2, first=30),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    return trainer
