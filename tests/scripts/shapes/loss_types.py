"""One run for each of four loss types, with another upper bound of the clip, and truncated completions masked."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        args = GRPOConfig(
            output_dir=f"{folder}/{loss_type}",
            loss_type=loss_type,
            epsilon_high=0.28,
            mask_truncated_completions=loss_type == "dapo",
            scale_rewards=loss_type != "dr_grpo",
            max_steps=1 if loss_type != "dapo" else 2,
        )
        trainer = GRPOTrainer(model, length, args=args, train_dataset=prompts())
        trainer.train()
    return trainer
