"""Two optimizer passes over each generation batch, and micro-batches that are smaller than a group."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    args = GRPOConfig(
        output_dir=folder,
        num_iterations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=4,
    )
    trainer = GRPOTrainer(model, length, args=args, train_dataset=prompts())
    trainer.train()
    return trainer
