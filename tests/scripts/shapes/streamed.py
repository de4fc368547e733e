"""A dataset that is streamed, with a mapping."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import contains_answer, questions


def main(model, folder):
    stream = questions().to_iterable_dataset().map(lambda row: {"prompt": row["question"]})
    args = GRPOConfig(output_dir=folder, max_steps=3)
    trainer = GRPOTrainer(model, contains_answer, args=args, train_dataset=stream)
    trainer.train()
    return trainer
