"""Two datasets for evaluation by name, fewer generations there, an evaluation at the start and after training."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


def main(model, folder):
    args = GRPOConfig(
        output_dir=folder, eval_strategy="steps", eval_steps=2, eval_on_start=True, num_generations_eval=2
    )
    trainer = GRPOTrainer(
        model,
        length,
        args=args,
        train_dataset=prompts(),
        eval_dataset={"easy": prompts(2, first=30), "hard": prompts(2, first=40)},
    )
    trainer.train()
    trainer.evaluate(prompts(2, first=50), metric_key_prefix="test")
    return trainer
