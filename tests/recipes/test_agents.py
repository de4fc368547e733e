"""The recipes whose agents learn on a CPU: their environments, what their policy is taught, and their curves."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

AGENTS = Path(__file__).parents[2] / "recipes" / "agents"
RECIPES = ("treasure", "slow_tool", "frozen_lake")


@pytest.fixture(autouse=True)
def agents(monkeypatch):
    monkeypatch.syspath_prepend(AGENTS)


@pytest.mark.parametrize("seed", range(20))
def test_who_follows_every_hint_reaches_the_treasure(seed):
    import treasure

    walk = treasure.Treasure()
    hint = walk.reset(**treasure.row(random.Random(seed)))
    for _ in range(treasure.MOVES):
        hint = walk.move(next((way for way in treasure.WAYS if way in hint), "north"))
    assert hint == "The treasure is here." and walk.get_reward() == 1.0


def test_the_reward_of_a_walk_is_the_share_of_the_way():
    from treasure import Treasure

    walk = Treasure()
    assert walk.reset(start=[0, 0], treasure=[2, 2]) == "The treasure is north-east."
    assert walk.get_reward() == 0.0
    assert walk.move("north") == "The treasure is north-east." and walk.get_reward() == 0.25
    walk.move("south"), walk.move("south"), walk.move("west")
    assert walk.get_reward() == 0.0


def test_the_policy_of_the_recipes_is_taught_whole_calls():
    from small_policy import small_policy
    from treasure import Treasure, example
    from trl.chat_template_utils import add_response_schema, parse_response

    draw = random.Random(0)
    model, tokenizer = small_policy([example(draw) for _ in range(64)], [Treasure().move], steps=1, seed=0)
    text = '<tool_call>\n{"name": "move", "arguments": {"direction": "north"}}\n</tool_call><|im_end|>'
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and len(ids) == 4 and model.num_parameters() < 1e6
    (call,) = parse_response(add_response_schema(tokenizer), ids, prefix=[])["tool_calls"]
    assert call["function"] == {"name": "move", "arguments": {"direction": "north"}}


def test_only_what_the_assistant_says_is_taught(monkeypatch):
    import small_policy
    from treasure import Treasure, example

    taught = {}
    monkeypatch.setattr(small_policy, "imitate", lambda model, ids, masks, **_: taught.update(ids=ids, masks=masks))
    chat = example(random.Random(0))
    _, tokenizer = small_policy.small_policy([chat] * 4, [Treasure().move], steps=1, seed=0)
    ids, mask = taught["ids"][0], taught["masks"][0]
    said = tokenizer.decode([i for i, taught in zip(ids, mask, strict=True) if taught])
    assert said.count("<tool_call>") == sum("tool_calls" in message for message in chat)
    assert "treasure is" not in said and said.count("<|im_end|>") == said.count("<tool_call>") + 1


def test_a_drawn_reward_is_the_mean_of_the_last_steps():
    from curves import WINDOW, smoothed

    rewards = [random.Random(0).random() for _ in range(12)]
    plain = [sum(rewards[max(0, i - WINDOW + 1) : i + 1]) / min(WINDOW, i + 1) for i in range(12)]
    assert smoothed(rewards) == pytest.approx(plain)


def test_a_study_runs_every_arm_with_every_seed_and_draws_them(tmp_path, monkeypatch, capsys):
    from curves import study

    def run(arm, seed, steps, folder):
        return [{"step": i + 1, "seconds": 2.0 * i, "reward": seed / 10 + i / steps} for i in range(steps)]

    monkeypatch.setattr(sys, "argv", ["study", "--seeds", "0", "1", "--steps", "10", "--output", str(tmp_path)])
    study(run, name="made_up", title="Made up", steps=5, arms=("one", "other"), against="seconds")
    curves = json.loads((tmp_path / "made_up.json").read_text())
    assert {arm: len(runs) for arm, runs in curves.items()} == {"one": 2, "other": 2}
    assert (tmp_path / "made_up.png").stat().st_size > 10_000
    assert "other, seed 1: reward 0.30 in the first 5 steps, 0.80 in the last, after 18 s" in capsys.readouterr().out


def test_a_board_of_textarena_is_that_of_its_seed_and_a_hole_ends_the_game():
    pytest.importorskip("textarena")
    from frozen_lake import Game

    boards = [Game(seed).observation for seed in (1, 2, 1)]
    assert boards[0] == boards[2] != boards[1] and "|  P  |" in boards[0]
    game = Game(1)
    assert not game.answer("[up]") and game.answer("[up]") and game.reward == 0.0


def learn(script: Path, folder: Path, *options: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), "--output", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name != "slow_tool")) for name in RECIPES]
)
def test_a_recipe_runs(recipe, tmp_path):
    if recipe == "frozen_lake":
        pytest.importorskip("textarena")
    printed = learn(AGENTS / f"{recipe}.py", tmp_path, "--seeds", "0", "--steps", "2", "--arms", "A3POTrainer")
    curves = json.loads((tmp_path / f"{recipe}.json").read_text())
    assert all([point["step"] for point in curve] == [1, 2] for runs in curves.values() for curve in runs)
    assert "seed 0: reward" in printed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", ["treasure", "frozen_lake"])
def test_the_reward_rises_on_three_seeds(recipe, tmp_path):
    if recipe == "frozen_lake":
        pytest.importorskip("textarena")
    printed = learn(AGENTS / f"{recipe}.py", tmp_path)
    rises = re.findall(r"reward ([\d.]+) in the first 5 steps, ([\d.]+) in the last", printed)
    assert len(rises) == 3 and all(float(last) - float(first) >= 0.2 for first, last in rises)
