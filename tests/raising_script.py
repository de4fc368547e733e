"""A script whose own code raises: `python raising_script.py KIND MODEL FOLDER`, for `test_users_line.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers import TrainerCallback

from tests.runs import build
from tests.tiny import tiny_prompts

calls = []


def look_up(text):
    found = {}
    return found[text]


def in_thread(completions, **kwargs):
    return [look_up(text) for text in completions]


async def awaited(completions, **kwargs):
    return [look_up(text) for text in completions]


def in_an_evaluation(completions, trainer_state, **kwargs):
    calls.append(trainer_state.global_step)
    return [look_up(text) if len(calls) > 2 else float(len(text)) for text in completions]


def in_a_transform(rows):
    calls.append(len(rows["prompt"]))
    return {**rows, "target": [look_up(text) if len(calls) > 40 else 1 for text in rows["prompt"]]}


class Raises(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        look_up("step")


SETTINGS = {
    "thread": {"reward_funcs": in_thread},
    "awaited": {"reward_funcs": awaited},
    "process": {"reward_funcs": in_thread, "reward_workers": 1},
    "filter": {"on_group": lambda group: look_up(group.prompt.index)},
    "evaluation": {
        "reward_funcs": in_an_evaluation,
        "eval_dataset": tiny_prompts(4),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
    },
    "callback": {"callbacks": [Raises()]},
    "transform": {"train_dataset": tiny_prompts().with_transform(in_a_transform), "max_steps": 30},
}

if __name__ == "__main__":
    kind, model, folder = sys.argv[1:]
    build(model, Path(folder), **SETTINGS[kind]).train()
