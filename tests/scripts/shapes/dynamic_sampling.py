"""DAPO's dynamic sampling by a subclass: a batch without spread is sampled again."""

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


class DynamicSamplingTrainer(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        for _ in range(2):
            batch = super()._generate_and_score_completions(inputs)
            if batch["advantages"].std() > 100:
                break
        return batch


def main(model, folder):
    trainer = DynamicSamplingTrainer(model, length, args=GRPOConfig(output_dir=folder), train_dataset=prompts())
    trainer.train()
    return trainer
