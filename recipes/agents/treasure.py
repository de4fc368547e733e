"""A policy learns to walk to a treasure, in up to seven turns: an environment of TRL, played asynchronously, on a CPU.

    python recipes/agents/treasure.py                       # three seeds; reward curves as JSON and PNG
    python recipes/agents/treasure.py --seeds 0 --steps 20  # one short run

The environment's method `move` is a tool; each answer says in which direction the treasure lies. A policy of 0.2
million parameters is first taught the format by examples of a player who follows the hint half of the time. RL then
teaches it to follow every hint. The reward is the share of the way to the treasure that the policy has gone.
"""

import random
from typing import Any

from curves import Curve, curve_of, study
from datasets import Dataset
from small_policy import Conversation, small_policy

from trl_a3po import A3POConfig, A3POTrainer

SIDE, MOVES = 6, 6
PROMPTS, GENERATIONS = 8, 8  # a batch: 64 episodes
EXAMPLES, TAUGHT_STEPS = 1024, 200
WAYS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


class Treasure:
    """A field of `SIDE` times `SIDE` places. The treasure is at most `MOVES` moves away."""

    def reset(self, start: list[int], treasure: list[int], **row) -> str:
        self._place, self._treasure, self._moves = start, treasure, 0
        self._whole = self._distance()
        return self._hint()

    def move(self, direction: str) -> str:
        """Move by one place.

        Args:
            direction: north, south, east or west.

        Returns:
            where the treasure is
        """
        if self._moves < MOVES and self._distance():
            self._moves += 1
            self._place = [a + b for a, b in zip(self._place, WAYS[direction], strict=True)]
        return self._hint()

    def get_reward(self) -> float:
        return max(0.0, 1 - self._distance() / self._whole)

    def _hint(self) -> str:
        x, y = (there - here for here, there in zip(self._place, self._treasure, strict=True))
        words = [("north" if y > 0 else "south") * (y != 0), ("east" if x > 0 else "west") * (x != 0)]
        return f"The treasure is {'-'.join(filter(None, words)) or 'here'}."

    def _distance(self) -> int:
        return sum(abs(a - b) for a, b in zip(self._place, self._treasure, strict=True))


def main():
    study(run, name="treasure", title="A walk to a treasure, with a tool that gives hints", steps=40)


def run(arm: str, seed: int, steps: int, folder: str) -> Curve:
    draw = random.Random(seed)
    model, tokenizer = small_policy(
        [example(draw) for _ in range(EXAMPLES)], [Treasure().move], steps=TAUGHT_STEPS, seed=seed
    )
    trainer = A3POTrainer(
        model,
        args=A3POConfig(max_staleness=2, tool_timeout=30.0, **settings(seed, steps, folder)),
        train_dataset=Dataset.from_list([row(draw) for _ in range(512)]),
        processing_class=tokenizer,
        environment_factory=Treasure,
    )
    return curve_of(trainer, f"{arm}, seed {seed}")


def settings(seed: int, steps: int, folder: str) -> dict[str, Any]:
    """The settings that `GRPOConfig` has too."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": PROMPTS * GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": 256,
        "max_tool_calling_iterations": MOVES,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }


def row(draw: random.Random) -> dict[str, Any]:
    """The row of a walk. The prompt is empty: `reset` writes the first hint behind it."""
    places = [[x, y] for x in range(SIDE) for y in range(SIDE)]
    while True:
        start, treasure = draw.sample(places, 2)
        if 3 <= sum(abs(a - b) for a, b in zip(start, treasure, strict=True)) <= MOVES:
            return {"prompt": [{"role": "user", "content": ""}], "start": start, "treasure": treasure}


def example(draw: random.Random) -> Conversation:
    """A walk in which every second move, on average, goes anywhere."""
    walk = Treasure()
    hint = walk.reset(**row(draw))
    messages = [{"role": "user", "content": hint}]
    for _ in range(MOVES):
        named = [way for way in WAYS if way in hint]
        way = draw.choice(named if draw.random() < 0.5 else [*WAYS])
        hint = walk.move(way)
        call = {"type": "function", "function": {"name": "move", "arguments": {"direction": way}}}
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "name": "move", "content": hint}]
        if "here" in hint:
            break
    return [*messages, {"role": "assistant", "content": "Done."}]


if __name__ == "__main__":
    main()
