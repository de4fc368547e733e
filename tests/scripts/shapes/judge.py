"""A judge behind a network, with latency, a semaphore and a client that is opened at the first call."""

import asyncio

from trl import GRPOConfig, GRPOTrainer

from tests.scripts.data import prompts


class Judge:
    __name__ = "judge"

    def __init__(self):
        self.limit = None

    async def grade(self, prompt, completion):
        async with self.limit:
            await asyncio.sleep(0.01)
            return float(len(completion) % 5)

    async def __call__(self, prompts, completions, **kwargs):
        self.limit = self.limit or asyncio.Semaphore(2)
        pairs = zip(prompts, completions, strict=True)
        return await asyncio.gather(*(self.grade(prompt, completion) for prompt, completion in pairs))


def main(model, folder):
    args = GRPOConfig(output_dir=folder, eval_strategy="steps", eval_steps=2)
    trainer = GRPOTrainer(model, [Judge()], args=args, train_dataset=prompts(), eval_dataset=prompts(2, first=30))
    trainer.train()
    return trainer
