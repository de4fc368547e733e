"""A user's type checker sees the public names: it finds misspelt settings and values of a wrong type."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trl_a3po
from trl_a3po import objectives, testing
from trl_a3po.protocol import engine, records, weights

ROOT = Path(trl_a3po.__file__).parent.parent
CORRECT = """
from trl_a3po import A3POConfig, A3POTrainer, Group, Rejection


def keep(group: Group) -> Group | Rejection | None:
    return group


args = A3POConfig(output_dir="run", max_staleness=4, num_generations=8)
trainer = A3POTrainer(model="model", reward_funcs=[], args=args, on_group=keep)
staleness: int = trainer.args.max_staleness
"""
WRONG = {
    "A3POConfig(max_stalenes=3)": 'Unexpected keyword argument "max_stalenes" for "A3POConfig"',
    'A3POConfig(max_staleness="4")': 'Argument "max_staleness" to "A3POConfig" has incompatible type "str"',
    "A3POConfig(num_generatons=8)": 'Unexpected keyword argument "num_generatons" for "A3POConfig"',
    'A3POTrainer(model="model", args=3)': 'Argument "args" to "A3POTrainer" has incompatible type "int"',
    "trl_a3po.A3POTrainr": 'Module has no attribute "A3POTrainr"',
}
"""What a user could write -> what mypy says of it."""
_TRL = "TRL's or transformers' own parameter, passed on"
TAKE_ANYTHING = {
    "A3POTrainer.__init__(model)": "a string, a model or a PEFT model, as TRL takes it",
    "A3POTrainer.__init__(reward_funcs)": "a string, a model, a function or a list of them, as TRL takes it",
    "A3POTrainer.__init__(arguments)": _TRL,
    "A3POTrainer.__init__(options)": _TRL,
    "A3POTrainer.train(args)": _TRL,
    "A3POTrainer.train(kwargs)": _TRL,
    "A3POTrainer.training_step(num_items_in_batch)": _TRL,
    "A3POTrainer.evaluation_loop(args)": _TRL,
    "A3POTrainer.evaluation_loop(kwargs)": _TRL,
    "PolicySpec.__init__(config)": "a configuration of transformers, which the protocol does not import",
}
"""Parameters of public names that are not typed precisely -> why."""


@pytest.fixture(scope="module")
def said_by_mypy(tmp_path_factory) -> dict[str, list[str]]:
    """What mypy says of a correct script, and of each line of `WRONG`. One run checks them all, in a process of its
    own, and without errors inside of the library, which are not a user's."""
    folder = tmp_path_factory.mktemp("user")
    lines = ["import trl_a3po", "from trl_a3po import A3POConfig, A3POTrainer", *WRONG]
    (folder / "correct.py").write_text(CORRECT)
    (folder / "wrong.py").write_text("\n".join(lines))
    config = [
        "--config-file",
        os.devnull,
        "--follow-imports",
        "silent",
        "--cache-dir",
        str(ROOT / ".mypy_cache" / "user"),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *config, "correct.py", "wrong.py"],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    said = {line: [e for e in errors if e.startswith(f"wrong.py:{lines.index(line) + 1}:")] for line in WRONG}
    return said | {CORRECT: [error for error in errors if error.startswith("correct.py")]}


def test_a_correct_script_passes(said_by_mypy):
    assert said_by_mypy[CORRECT] == []


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_found(said_by_mypy, line):
    assert any(WRONG[line] in error for error in said_by_mypy[line]), said_by_mypy[line]


def defined_in(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", "") == module.__name__


def public_callables() -> Iterator[tuple[str, Any]]:
    """Name and function of everything that a user calls, methods of classes included."""
    names = {name: getattr(trl_a3po, name) for name in trl_a3po.__all__}
    names |= {name: getattr(objectives, name) for name in objectives.__all__}
    for module in (engine, records, weights, testing):
        names |= {
            name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
    for name, value in names.items():
        if name.startswith("_"):
            continue
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for method, function in vars(value).items():
                called = method == "__init__" and not getattr(value, "_is_protocol", False)
                if inspect.isfunction(function) and (called or not method.startswith("_")):
                    yield f"{name}.{method}", function


def test_public_names_are_typed_precisely():
    imprecise = set()
    for name, function in public_callables():
        signature = inspect.signature(function)
        for parameter in list(signature.parameters.values())[("." in name) :]:
            if parameter.annotation in (inspect.Parameter.empty, Any, "Any"):
                imprecise.add(f"{name}({parameter.name})")
        if not name.endswith("__init__") and signature.return_annotation in (inspect.Signature.empty, Any, "Any"):
            imprecise.add(f"{name} -> ?")
    assert imprecise == set(TAKE_ANYTHING)


def test_the_marker_of_typed_packages_is_in_the_package():
    assert (ROOT / "trl_a3po" / "py.typed").is_file()
