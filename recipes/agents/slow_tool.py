"""A tool that is slow, and sometimes very slow: the walk of `treasure.py` under `GRPOTrainer` and `A3POTrainer`.

    python recipes/agents/slow_tool.py                                       # half an hour, most of it GRPOTrainer's
    python recipes/agents/slow_tool.py --arms A3POTrainer --seeds 0 --steps 5

Each call of the tool waits for a time that is drawn from a log-normal distribution with a median of 0.3 s: one call in
20 takes more than 1.5 s. The tool is an `async def`; `GRPOTrainer` makes the calls of one message at the same time,
and those of different episodes one after another. It trains when the last episode has ended. `A3POTrainer` plays the
episodes side by side, and trains meanwhile.
"""

import asyncio
import random

from curves import Curve, curve_of, study
from datasets import Dataset
from small_policy import small_policy
from treasure import EXAMPLES, TAUGHT_STEPS, Treasure, example, row, settings
from trl import GRPOConfig, GRPOTrainer

from trl_a3po import A3POConfig, A3POTrainer

MEDIAN, SPREAD = 0.3, 1.0  # seconds; standard deviation of their logarithm
LATENCY = random.Random(0)


class SlowTreasure(Treasure):
    """The hint comes from a service that takes its time."""

    async def move(self, direction: str) -> str:
        """Move by one place.

        Args:
            direction: north, south, east or west.

        Returns:
            where the treasure is
        """
        await asyncio.sleep(MEDIAN * LATENCY.lognormvariate(0, SPREAD))
        return super().move(direction)


def main():
    study(
        run,
        name="slow_tool",
        title=f"The walk with a tool whose median latency is {MEDIAN} s",
        steps=15,
        seeds=[0],
        arms=("A3POTrainer", "GRPOTrainer"),
        against="seconds",
    )


def run(arm: str, seed: int, steps: int, folder: str) -> Curve:
    draw = random.Random(seed)
    model, tokenizer = small_policy(
        [example(draw) for _ in range(EXAMPLES)], [Treasure().move], steps=TAUGHT_STEPS, seed=seed
    )
    trainer_class, config = (A3POTrainer, A3POConfig) if arm == "A3POTrainer" else (GRPOTrainer, GRPOConfig)
    trainer = trainer_class(
        model,
        reward_funcs=None,
        args=config(**settings(seed, steps, folder), bf16=False),
        train_dataset=Dataset.from_list([row(draw) for _ in range(512)]),
        processing_class=tokenizer,
        environment_factory=SlowTreasure,
    )
    return curve_of(trainer, f"{arm}, seed {seed}")


if __name__ == "__main__":
    main()
