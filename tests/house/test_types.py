"""What a type checker knows of the library: mypy finds a user's mistakes, and every public name has precise types."""

import inspect
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trl_a3po
import trl_a3po.errors
import trl_a3po.objectives
import trl_a3po.protocol.engine
import trl_a3po.protocol.records
import trl_a3po.protocol.weights
import trl_a3po.testing

ROOT = Path(trl_a3po.__file__).parent.parent

CORRECT = """
from typing import Any

from datasets import Dataset
from trl_a3po import A3POConfig, A3POTrainer, Group, Rejection


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def not_too_long(group: Group) -> Rejection | None:
    longest = max(len(rollout.token_ids) for rollout in group.rollouts)
    return Rejection("too long") if longest > 100 else None


args = A3POConfig("outputs", max_staleness=2, schedule="periodic", learning_rate=1e-5, engine_slots=None, bf16=True)
sums = Dataset.from_list([{"prompt": f"{a} + {a} ="} for a in range(10)])
trainer = A3POTrainer("model", digits, args=args, train_dataset=sums, on_group=not_too_long)
trainer.train()
staleness: int = args.staleness_bound
trained_with: A3POConfig = trainer.args
"""

MISTAKES = {
    "a misspelt setting": ("A3POConfig(max_stalenes=3)", "call-arg", "max_stalenes"),
    "a setting of the wrong type": ('A3POConfig(max_staleness="4")', "arg-type", "max_staleness"),
    "a misspelt setting of TRL's": ("A3POConfig(learning_rat=1e-5)", "call-arg", "learning_rat"),
    "a value that is not a choice": ('A3POConfig(schedule="asynchronous")', "arg-type", "schedule"),
    "a config of TRL's": ("A3POTrainer('model', args=GRPOConfig('outputs'))", "arg-type", "A3POConfig"),
    "a misspelt import": ("from trl_a3po import A3POTrainr", "attr-defined", "A3POTrainr"),
    "a misspelt attribute": ("print(A3POConfig('outputs').max_stalenes)", "attr-defined", "max_stalenes"),
    "a misspelt argument": ("A3POTrainer('model', train_datset=None)", "call-arg", "train_datset"),
    "an argument of the wrong type": ("A3POTrainer('model', callbacks=print)", "arg-type", "callbacks"),
    "a hook that returns a number": ("A3POTrainer('model', on_group=len)", "arg-type", "on_group"),
}

PASSED_ON = "arguments of TRL or transformers, passed on"
CONVERSATION = "text or messages, in any form that the chat template takes"
IMPRECISE = {
    "A3POTrainer.train(args)": PASSED_ON,
    "A3POTrainer.train(kwargs)": PASSED_ON,
    "A3POTrainer.evaluation_loop(args)": PASSED_ON,
    "A3POTrainer.evaluation_loop(kwargs)": PASSED_ON,
    "Episode.begin(prompt)": CONVERSATION,
    "EpisodeRecord.__init__(prompt)": CONVERSATION,
    "EpisodeRecord.__init__(messages)": CONVERSATION,
    "EpisodeRecord.__init__(images)": "images, or their places in a checkpoint, whose reader does without torch",
    "EpisodeResult.__init__(messages)": CONVERSATION,
    "PolicySpec.__init__(config)": "a configuration of transformers, which the protocol does not import",
}
"""Parameters of public names that take any value -> why."""

MODULES = (
    trl_a3po.errors,
    trl_a3po.protocol.engine,
    trl_a3po.protocol.records,
    trl_a3po.protocol.weights,
    trl_a3po.testing,
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[str]]:
    """Name of a snippet -> what mypy reports, all from one run, which shares the cache of a plain `mypy`."""
    folder = tmp_path_factory.mktemp("snippets")
    sources = {"a correct script": CORRECT} | {
        name: f"from trl import GRPOConfig\nfrom trl_a3po import A3POConfig, A3POTrainer\n\n{line}\n"
        for name, (line, _, _) in MISTAKES.items()
    }
    files = {name: folder / f"snippet_{number}.py" for number, name in enumerate(sources)}
    for name, source in sources.items():
        files[name].write_text(source)
    command = [sys.executable, "-m", "mypy", "--no-warn-unused-configs", "--no-pretty", *map(str, files.values())]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 1, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    found = {
        name: [line for line in lines if Path(line.partition(":")[0]).name == f.name] for name, f in files.items()
    }
    assert "Found" in lines[-1] and sum(map(len, found.values())) >= len(lines) - 1, run.stdout
    return found


@pytest.mark.long
def test_a_correct_script_passes(reports):
    assert reports["a correct script"] == []


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mypy_finds(mistake, reports):
    _, code, named = MISTAKES[mistake]
    errors = [line for line in reports[mistake] if ": error: " in line]
    assert len(errors) == 1, errors
    assert errors[0].endswith(f"[{code}]")
    assert named in errors[0]


def public_objects() -> Iterator[tuple[str, Any]]:
    for module, names in [
        (trl_a3po, trl_a3po.__all__),
        (trl_a3po.objectives, trl_a3po.objectives.__all__),
        *((module, defined_in(module)) for module in MODULES),
    ]:
        for name in names:
            yield name, getattr(module, name)


def defined_in(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def functions_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A public function, or the public methods and the constructor of a public class, as far as they are written in
    this package."""
    if inspect.isfunction(value):
        yield name, value
    if not inspect.isclass(value):
        return
    for attribute, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        public = not attribute.startswith("_") or attribute in ("__init__", "__call__")
        if public and inspect.isfunction(function) and function.__module__.startswith("trl_a3po"):
            yield f"{name}.{attribute}", function


def imprecise(name: str, function: Any) -> Iterator[str]:
    """The parameters and the result of a function whose annotation is missing or `Any`."""
    hints = typing.get_type_hints(function)
    for number, parameter in enumerate(inspect.signature(function).parameters):
        is_self = number == 0 and parameter in ("self", "cls")
        if not is_self and hints.get(parameter, Any) is Any:
            yield f"{name}({parameter})"
    if function.__name__ != "__init__" and hints.get("return", Any) is Any:
        yield f"{name} -> Any"


def test_every_public_name_is_typed():
    found = {
        where
        for name, value in public_objects()
        for named, function in functions_of(name, value)
        for where in imprecise(named, function)
    }
    assert found == set(IMPRECISE)


def test_type_checkers_may_use_the_annotations():
    assert (ROOT / "trl_a3po" / "py.typed").is_file()


def test_every_ignored_error_has_a_code_and_a_reason():
    ignores = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "trl_a3po").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "type: ignore" in line and not re.search(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]  # \S", line)
    ]
    assert not ignores
