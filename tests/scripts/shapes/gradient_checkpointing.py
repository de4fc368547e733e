"""Gradient checkpointing, its keyword arguments, a warm-up and weight decay."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    args = GRPOConfig(
        output_dir=folder,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        warmup_steps=2,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        max_grad_norm=0.2,
    )
    trainer = GRPOTrainer(model, length, args=args, train_dataset=prompts())
    trainer.train()
    return trainer
