"""FrozenLake of textarena, played by a loop of one's own: an environment that this project did not write, on a CPU.

    pip install textarena==0.7.4
    python recipes/agents/frozen_lake.py                       # three seeds; reward curves as JSON and PNG
    python recipes/agents/frozen_lake.py --seeds 0 --steps 20  # one short run

A rollout function plays one game: the policy reads the board, answers with a move such as `[right]`, and reads the
next board. The reward is textarena's: 1 at the goal; otherwise, at a hole or at the second move into a wall, the share
of the way that was gone. A game that is not over after `MOVES` moves has a reward of 0. A policy of 0.2 million
parameters is first taught the format by examples of a player who moves at random.
"""

import random

import textarena
from curves import Curve, curve_of, study
from datasets import Dataset
from small_policy import Conversation, small_policy

from trl_a3po import A3POConfig, A3POTrainer, Episode

MOVES = 10
PROMPTS, GENERATIONS = 8, 8  # a batch: 64 games
EXAMPLES, TAUGHT_STEPS = 512, 100
CELLS = r"\|[^|\n]*|[^|\n]*\n|[^|\n]+"  # a cell of the board is a token, and so is a line of other text


async def play(episode: Episode) -> float:
    game = Game(episode.row["board"])
    messages = [{"role": "user", "content": game.observation}]
    for _ in range(MOVES):
        turn = await episode.sample(messages)
        if game.answer(turn.text):
            return game.reward
        messages += [turn.message, {"role": "user", "content": game.observation}]
    return 0.0


class Game:
    """A game of textarena with one player.

    Args:
        board: seed of the board.

    Attributes:
        observation: what the player reads next.
        reward: of a game that is over.
    """

    def __init__(self, board: int):
        self._game = textarena.make("FrozenLake-v0-raw")
        self._game.reset(num_players=1, seed=board)
        self.observation, self.reward = self._observed(), 0.0

    def answer(self, text: str) -> bool:
        """Play what the player answers. Returns whether the game is over."""
        over, _ = self._game.step(text)
        if over:
            rewards, _ = self._game.close()
            self.reward = float(rewards[0])
        else:
            self.observation = self._observed()
        return over

    def _observed(self) -> str:
        """The board; it is the last of the observations."""
        _, observations = self._game.get_observation()
        return observations[-1][1]


def main():
    study(run, name="frozen_lake", title="FrozenLake of textarena", steps=50)


def run(arm: str, seed: int, steps: int, folder: str) -> Curve:
    draw = random.Random(seed)
    model, tokenizer = small_policy(
        [example(draw) for _ in range(EXAMPLES)], pieces=CELLS, steps=TAUGHT_STEPS, seed=seed
    )
    args = A3POConfig(
        output_dir=folder,
        max_staleness=2,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=900,
        episode_timeout=300.0,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    boards = [{"prompt": [{"role": "user", "content": ""}], "board": draw.randrange(10**6)} for _ in range(512)]
    trainer = A3POTrainer(
        model, args=args, train_dataset=Dataset.from_list(boards), processing_class=tokenizer, rollout_func=play
    )
    return curve_of(trainer, f"{arm}, seed {seed}")


def example(draw: random.Random) -> Conversation:
    """A game of a player who moves at random."""
    game, messages = Game(draw.randrange(10**6)), []
    for _ in range(MOVES):
        move = draw.choice(["[up]", "[down]", "[left]", "[right]"])
        messages += [{"role": "user", "content": game.observation}, {"role": "assistant", "content": move}]
        if game.answer(move):
            break
    return messages


if __name__ == "__main__":
    main()
