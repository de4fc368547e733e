"""A curriculum: a sampler that hands out the short prompts first."""

from torch.utils.data import Sampler
from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import length, prompts


class EasyFirst(Sampler):
    def __init__(self, rows, groups, generations, repeats):
        self.rows, self.groups, self.generations, self.repeats = rows, groups, generations, repeats

    def __len__(self):
        return len(self.rows) * self.generations * self.repeats

    def __iter__(self):
        for start in range(0, len(self.rows) - self.groups + 1, self.groups):
            batch = [row for row in self.rows[start : start + self.groups] for _ in range(self.generations)]
            yield from batch * self.repeats


class CurriculumTrainer(GRPOTrainer):
    def _get_train_sampler(self, dataset=None):
        lengths = [len(row["prompt"]) for row in self.train_dataset]
        rows = sorted(range(len(lengths)), key=lengths.__getitem__)
        groups = self.args.generation_batch_size // self.num_generations
        return EasyFirst(rows, groups, self.num_generations, self.args.steps_per_generation * self.num_iterations)


def main(model, folder):
    trainer = CurriculumTrainer(model, length, args=GRPOConfig(output_dir=folder), train_dataset=prompts())
    trainer.train()
    return trainer
