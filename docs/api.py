"""Writes the pages of `docs/api/` from the docstrings of the public names.

    python docs/api.py

Guarantees: a page holds what the docstrings and the fields' help say and nothing else; the same sources give the same
pages on every machine. A test holds the committed pages against `pages()`.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from trl import GRPOConfig

import trl_a3po.protocol.engine
from trl_a3po import A3POConfig

FOLDER = Path(__file__).parent / "api"
ON_TOP = "<!-- Written by docs/api.py from the docstrings: change those, then run it again. -->\n"
WIDTH = 100
SECTIONS = {"Args": "Arguments", "Raises": "Raises"}
CODE = re.compile(r"(?<![\w`/])(?:\w+=)?'[\w.]+'|\b\w+=(?:True|False|\d+)|\b[a-z]+(?:_[a-z]+)+\b")  # in a help text
PAGES = {  # file -> its title, what it is about, and its names
    "trainer.md": (
        "The trainer",
        "And what `on_group`, called with every finished group, receives and returns.",
        {
            "trl_a3po.trainer": ["A3POTrainer"],
            "trl_a3po.protocol.records": ["Group", "Rollout", "Prompt", "Score"],
            "trl_a3po.rollout.outcomes": ["Rejection"],
        },
    ),
    "objectives.md": ("Objectives", "", {"trl_a3po.objectives": None}),
    "engines.md": (
        "Engines",
        "`A3POConfig(engine=…)` takes any object with the methods of `Engine`.\n\n"
        + inspect.getdoc(trl_a3po.protocol.engine),
        {
            "trl_a3po.protocol.engine": [
                "Engine", "SamplingSettings", "GroupRequest", "GroupFinished", "GroupFailed", "EngineStats",
            ],
            "trl_a3po.protocol.weights": ["PolicySpec", "WeightUpdate"],
            "trl_a3po.testing": ["StubEngine", "scripted_completion"],
        },
    ),
    "report.md": (
        "After a run",
        "What a run leaves, as lists of dictionaries for pandas and as pictures; "
        "[metrics.md](../metrics.md) says what it means.",
        {
            "trl_a3po.report.history": ["read_history", "by_staleness"],
            "trl_a3po.report.timeline": ["read_timeline"],
            "trl_a3po.report.plot": ["plot_run", "run_figure", "time_split", "waiting_share"],
            "trl_a3po.report.compare": ["plot_runs", "runs_figure"],
            "trl_a3po.report.environment": ["environment"],
        },
    ),
    "errors.md": ("Errors", "", {"trl_a3po.errors": None}),
}  # fmt: skip


def pages() -> dict[str, str]:
    """File name in `docs/api/` -> text of the page."""
    written = {"config.md": config_page()}
    for file, (title, about, modules) in PAGES.items():
        written[file] = _page(title, about, modules)
    lines = [f"| [{file}]({file}) | {_contents(file)} |" for file in written]
    index = "Every public name, from its docstring; the pages one level up say how they play together."
    table = "\n".join(["| page | names |", "|---|---|", *lines])
    written["README.md"] = f"{ON_TOP}\n# API\n\n{index}\n\n{table}\n"
    return written


def config_page() -> str:
    """`A3POConfig`: the fields it adds, in the groups of its docstring, and those whose default differs."""
    help_of = {field.name: field for field in dataclasses.fields(A3POConfig)}
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    parts = [
        f"{ON_TOP}\n# `A3POConfig`",
        "A `GRPOConfig` with the settings below. Everything of "
        "[`GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig) keeps its meaning or is refused "
        "with what to set instead. Which settings matter first: [settings.md](../settings.md).",
        "Beside fields, a config has `plan()`: " + _first_line(A3POConfig.plan),
    ]
    for group, names in _groups(A3POConfig):
        parts += [f"## {group}", _fields_table([help_of[name] for name in names])]
    changed = [field for name, field in help_of.items() if name in theirs and field.default != theirs[name]]
    parts += ["## Defaults that differ from `GRPOConfig`", _fields_table(changed)]
    return "\n\n".join(parts) + "\n"


def _groups(config: type) -> list[tuple[str, list[str]]]:
    """Headings (`> Parameters that …`) of a config's docstring, and the fields described under each."""
    groups: list[tuple[str, list[str]]] = []
    for line in inspect.getdoc(config).splitlines():
        if heading := re.fullmatch(r" +> Parameters that control (.+)", line):
            groups.append((heading[1][0].upper() + heading[1][1:], []))
        elif field := re.match(r" +(\w+) \(`", line):
            groups[-1][1].append(field[1])
    return groups


def _fields_table(fields: list[dataclasses.Field]) -> str:
    rows = ["| setting | default | what it does |", "|---|---|---|"]
    for field in fields:
        described = " ".join(field.metadata["help"].split()).replace("|", "\\|")
        choices = field.metadata.get("choices")
        if choices and not all(repr(choice) in described for choice in choices):
            described += f" One of {', '.join(f'`{choice!r}`' for choice in choices)}."
        described = CODE.sub(lambda found: f"`{found[0]}`" if _is_code(found[0]) else found[0], described)
        rows.append(f"| `{field.name}` | `{field.default!r}` | {described} |")
    return "\n".join(rows)


def _is_code(words: str) -> bool:
    return "'" in words or "=" in words or words in A3POConfig.__dataclass_fields__


def _page(title: str, about: str, modules: dict[str, list[str] | None]) -> str:
    parts = [f"{ON_TOP}\n# {title}", about]
    for name, chosen in modules.items():
        module = importlib.import_module(name)
        if chosen is None:
            parts.append(_prose(inspect.getdoc(module)))
        for member in chosen or _public(module):
            parts += _described(getattr(module, member), name)
    return "\n\n".join(part for part in parts if part) + "\n"


def _contents(file: str) -> str:
    if file == "config.md":
        return "`A3POConfig`"
    modules = PAGES[file][2]
    names = [name for module, chosen in modules.items() for name in chosen or _public(importlib.import_module(module))]
    return ", ".join(f"`{name}`" for name in names)


def _public(module: ModuleType) -> list[str]:
    """What a module exports, functions first, or else the classes it defines, in their order."""
    if exported := getattr(module, "__all__", None):
        return sorted(exported, key=lambda name: inspect.isclass(getattr(module, name)))
    return [
        name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
    ]


def _described(value: Any, module: str) -> list[str]:
    name = value.__name__
    definition = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    module = "trl_a3po" if name in trl_a3po.__all__ else module
    parts = [f"## `{name}`", _signature(definition, module), _prose(ast.get_docstring(definition))]
    for node in definition.body:
        public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if public and inspect.isclass(value) and (described := ast.get_docstring(node)):
            parts += [f"### `{name}.{node.name}`", _signature(node), _prose(described)]
    return parts


def _signature(definition: ast.ClassDef | ast.FunctionDef, module: str = "") -> str:
    """As it is called, with its import, in a block of code; of an error what it is; of other classes nothing where a
    user does not make them."""
    name, returns = definition.name, ""
    if isinstance(definition, ast.FunctionDef):
        arguments = _arguments(definition.args)
        if definition.returns is not None:
            returns = f" -> {ast.unparse(definition.returns)}"
    else:
        bases = [ast.unparse(base) for base in definition.bases]
        if bases and bases[0].endswith("Error"):
            return f"```python\nclass {name}({', '.join(bases)})\n```"
        arguments = _class_arguments(definition)
        if arguments is None:
            return ""
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"
    imported = f"from {module} import {name}\n\n" if module else ""
    return f"```python\n{imported}{line}\n```"


def _class_arguments(definition: ast.ClassDef) -> list[str] | None:
    for node in definition.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return _arguments(node.args)
    if not any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list):
        return None
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    return [_argument(ast.arg(field.target.id, field.annotation), _field_default(field.value)) for field in fields]


def _field_default(value: ast.expr | None) -> ast.expr | None:
    """The default of a dataclass's field, also where it is wrapped in `field(…)`."""
    if not isinstance(value, ast.Call):
        return value
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    return given.get("default") or ast.Call(given["default_factory"], [], [])


def _arguments(arguments: ast.arguments) -> list[str]:
    """Each argument as written, without `self`, and with a star that stands alone."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    written = [_argument(name, default) for name, default in zip(positional, defaults, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        written.append(f"*{_argument(arguments.vararg) if arguments.vararg else ''}")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    written += [_argument(name, default) for name, default in keywords]
    if arguments.kwarg:
        written.append(f"**{_argument(arguments.kwarg)}")
    return [argument for argument in written if argument not in ("self", "cls")]


def _argument(argument: ast.arg, default: ast.expr | None = None) -> str:
    typed = ast.unparse(argument)
    if default is None:
        return typed
    equals = " = " if argument.annotation else "="
    return f"{typed}{equals}{ast.unparse(default)}"


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: its sections `Args` and `Raises` as lists, references to other projects as code."""
    text = re.sub(r"\[`~?(?:[\w.]+\.)?(\w+)`\]", r"`\1`", (docstring or "").strip())
    parts = re.split(r"^(Args|Raises|Returns):\n", text, flags=re.M)
    written = [parts[0].strip()]
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        section, rest = _until_dedent(body)
        if name == "Returns":
            written += [f"**Returns** {' '.join(section.split())}", rest]
        else:
            written += [f"**{SECTIONS[name]}**", "\n".join(_item(item) for item in _items(section)), rest]
    return "\n\n".join(part for part in written if part)


def _until_dedent(body: str) -> tuple[str, str]:
    """The indented lines at the beginning of `body`, and what comes after."""
    lines = body.splitlines()
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return textwrap.dedent("\n".join(lines[:end])), "\n".join(lines[end:]).strip()


def _items(section: str) -> list[str]:
    """The entries of a section; continued lines are indented."""
    return [" ".join(item.split()) for item in re.split(r"\n(?=\S)", section.strip()) if item.strip()]


def _item(item: str) -> str:
    found = re.match(r"([\w, *]+): (.*)", item)
    if not found:
        return f"- {item}"
    names = ", ".join(f"`{name.strip()}`" for name in found[1].split(","))
    return f"- {names}: {found[2]}"


def _first_line(function: Any) -> str:
    return " ".join(inspect.getdoc(function).split("\n\n")[0].split())


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.md"):
        file.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
