"""A KL term, and a reference model that follows the policy."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    args = GRPOConfig(
        output_dir=folder, beta=0.04, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5
    )
    trainer = GRPOTrainer(model, length, args=args, train_dataset=prompts())
    trainer.train()
    return trainer
