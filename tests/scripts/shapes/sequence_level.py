"""GSPO: importance weights per sequence."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    args = GRPOConfig(
        output_dir=folder,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        steps_per_generation=4,
    )
    trainer = GRPOTrainer(model, length, args=args, train_dataset=prompts())
    trainer.train()
    return trainer
