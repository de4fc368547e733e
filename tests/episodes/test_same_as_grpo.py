"""With max_staleness=0 and the same completions, tools and environments train as GRPOTrainer's own loop does: the same
tokens, masks, rewards, metrics, table of completions, loss and gradients."""

import copy

import pytest
import torch
from trl import GRPOTrainer

from tests.episodes.chat import call, chat_model, chat_tokenizer, questions, results_in, said
from tests.runs import GENERATIONS, assert_same_gradients, build, train_recorded
from trl_a3po import A3POTrainer
from trl_a3po.testing import StubEngine

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")]


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: a number
        b: a number

    Returns:
        the sum
    """
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Adds, later.

    Args:
        a: a number
        b: a number

    Returns:
        the sum
    """
    return a + b


def long_text(length: int) -> str:
    """Gives a text.

    Args:
        length: of the text

    Returns:
        the text
    """
    return "x" * length


class Counter:
    """Adds up, begins with an observation that differs by rollout, and gives its sum as reward."""

    resets = 0

    def reset(self, number, **row):
        self.sum, type(self).resets = 0, type(self).resets + 1
        return f" begin {number}"

    def add_up(self, k: int) -> int:
        """Adds to the sum.

        Args:
            k: what to add

        Returns:
            the sum
        """
        self.sum += k
        return self.sum

    def get_reward(self):
        return float(self.sum)


class Other(Counter):
    def reset(self, **row):
        self.sum = 1

    async def get_reward(self):
        return 0.5 + self.sum


def talk(prompt_ids, number: int) -> list[int]:
    """Turns with no, one and several calls, some of which fail or cannot be parsed."""
    turn = results_in(prompt_ids)
    text = [
        f"no calls {number}",
        f"first {number}" + call("add", a=number, b=1) + ("" if turn < 3 else "no end"),
        f"mixed {number}" + call("slow_add", a=1, b=2) + call("add", a=3, b=4) + call("nothing", x=1),
        f"wrong {number}" + call("add", c=1),
    ][number % 4]
    return said(text) if turn < number else said(f"answer {number}" + "<tool_call>{bad</tool_call>" * (number == 3))


def play(prompt_ids, number: int) -> list[int]:
    turn = results_in(prompt_ids)
    return said(f"turn {number}" + call("add_up", k=turn + number)) if turn < number else said(f"end {number}")


def ask_for_text(prompt_ids, number: int) -> list[int]:
    turn = results_in(prompt_ids)
    return said(f"long {number}" + call("long_text", length=30 * number)) if turn < 3 else said("end")


class ToldGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose policy says what the stub engine says, turn by turn; it keeps its batches."""

    complete = None

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if not getattr(self, "texts", None):
            self.texts = [list(ids) for ids in prompt_ids]
            rows = range(len(prompt_ids))
        else:
            rows = [next(i for i, text in enumerate(self.texts) if ids[: len(text)] == text) for ids in prompt_ids]
        turns = [self.complete(ids, row % GENERATIONS) for ids, row in zip(prompt_ids, rows, strict=True)]
        for ids, row, turn in zip(prompt_ids, rows, turns, strict=True):
            self.texts[row] = [*ids, *turn]
        return copy.deepcopy(turns), [[-1.0] * len(turn) for turn in turns]

    def _generate(self, prompts):
        self.texts = None
        return super()._generate(prompts)

    def _generate_and_score_completions(self, inputs):
        return kept(self, super()._generate_and_score_completions(inputs))


class KeepingTrainer(A3POTrainer):
    def _generate_and_score_completions(self, inputs):
        return kept(self, super()._generate_and_score_completions(inputs))


def kept(trainer, batch):
    trainer.batches = [*getattr(trainer, "batches", []), dict(batch)]
    return batch


def length_reward(completions, completion_ids, prompts, **kwargs):
    return [
        float(sum(len(str(message["content"])) for message in messages) + len(ids) + len(prompt[-1]["content"]))
        for messages, ids, prompt in zip(completions, completion_ids, prompts, strict=True)
    ]


def last_sum(environments, **kwargs):
    return [float(environment.sum) for environment in environments]


BOTH = {"number": Counter, "other": Other}
CASES = {
    "tools, synchronous and asynchronous, and failures": (talk, {"tools": [add, slow_add]}),
    "a limit of iterations": (talk, {"tools": [add, slow_add], "max_tool_calling_iterations": 1}),
    "a completion cut in a later turn": (talk, {"tools": [add, slow_add], "max_completion_length": 170}),
    "results that do not fit": (ask_for_text, {"tools": [long_text], "max_completion_length": 250}),
    "truncated completions masked": (
        ask_for_text,
        {"tools": [long_text], "max_completion_length": 250, "mask_truncated_completions": True},
    ),
    "an environment": (play, {"environment_factory": Counter}),
    "an environment whose reward functions see it": (
        play, {"environment_factory": Counter, "reward_funcs": [length_reward, last_sum]},
    ),
    "an environment beside tools": (play, {"environment_factory": Counter, "tools": [add]}),
    "several environments": (
        play,
        {"environment_factory": BOTH, "train_dataset": questions(8, environment=["number", "other"] * 4)},
    ),
    "an environment that owns the data": (
        play,
        {"environment_factory": Counter, "train_dataset": questions(8).remove_columns("prompt"), "reward_funcs": None},
    ),
    "options of the chat template": (talk, {"tools": [add], "chat_template_kwargs": {"enable_thinking": False}}),
}  # fmt: skip
METRICS = ("tools/", "completions/", "rewards/", "reward", "num_tokens", "frac_reward_zero_std", "loss", "grad_norm")


def both(tmp_path, complete, **settings):
    settings = {
        "reward_funcs": length_reward, "train_dataset": questions(), "max_completion_length": 600, "max_steps": 2,
        "log_completions": True, "shuffle_dataset": False, **settings,
    }  # fmt: skip
    trainers = []
    for trainer_class, own in ((ToldGRPOTrainer, {}), (KeepingTrainer, {"engine": StubEngine(complete)})):
        # GRPOTrainer adds the rewards of environments to the list it is given.
        lists = {name: list(value) for name, value in settings.items() if isinstance(value, list)}
        trainer = build(
            chat_model(), tmp_path, trainer_class, processing_class=chat_tokenizer(), **(settings | lists | own)
        )
        trainer.complete = complete
        trainer.gradients = train_recorded(trainer)
        trainers.append(trainer)
    return trainers


@pytest.mark.parametrize("name", CASES)
def test_an_episode_trains_as_in_grpo(tmp_path, name):
    complete, settings = CASES[name]
    theirs, mine = both(tmp_path, complete, **settings)
    for expected, got in zip(theirs.batches, mine.batches, strict=True):
        for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"):
            torch.testing.assert_close(got.get(key), expected.get(key), msg=lambda text, key=key: f"{key}: {text}")
        assert got["num_items_in_batch"] == expected["num_items_in_batch"]
        masked = got["behavior_versions"] < 0
        sampled = got["completion_ids"] != mine.processing_class.pad_token_id
        if got.get("tool_mask") is not None and not mine.mask_truncated_completions:
            assert torch.equal(~masked, sampled & got["tool_mask"].bool())
    assert_same_gradients(mine.gradients, theirs.gradients)
    for expected, got in zip(theirs.state.log_history, mine.state.log_history, strict=True):
        same = {key: value for key, value in expected.items() if key.startswith(METRICS)}
        assert {key: got[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-6, nan_ok=True)
    for column in ("prompt", "completion"):
        assert list(mine._logs[column]) == list(theirs._logs[column])
    assert list(mine._logs["advantages"]) == pytest.approx(list(theirs._logs["advantages"]), abs=1e-5)
