"""The rooms of the library, each a folder or a file of `trl_a3po/`, import each other in one direction only."""

import ast
import graphlib
import itertools
from collections import defaultdict
from pathlib import Path

import trl_a3po

PACKAGE = Path(trl_a3po.__file__).parent
PURE = {
    "objectives": {"torch"},
    "protocol": {"torch"},
    "rollout": {"torch"},
}
"""Rooms that do without most of the libraries installed -> those of them that they may import."""
HEAVY = {"accelerate", "datasets", "deepspeed", "peft", "torch", "transformers", "trl", "vllm"}


def imports_of(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in the file, except for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.update({f"{node.module}.{alias.name}" for alias in node.names} if node.module else ())
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_by_room() -> dict[str, dict[str, set[str]]]:
    """Room -> room that it imports -> the files that do."""
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")}
    graph: dict[str, dict[str, set[str]]] = {room: defaultdict(set) for room in rooms}
    for path in PACKAGE.rglob("*.py"):
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "trl_a3po" and len(parts) > 1 and parts[1] in rooms - {room_of(path)}:
                graph[room_of(path)][parts[1]].add(str(path.relative_to(PACKAGE)))
    return graph


def test_rooms_import_each_other_in_one_direction():
    graph = imports_by_room()
    try:
        order = list(graphlib.TopologicalSorter({room: set(users) for room, users in graph.items()}).static_order())
    except graphlib.CycleError as error:
        cycle = error.args[1]
        steps = [f"{room} <- {user}: {sorted(graph[user][room])}" for room, user in itertools.pairwise(cycle)]
        raise AssertionError("rooms import each other:\n" + "\n".join(steps)) from None
    assert order.index("protocol") < order.index("engines") < order.index("session") < order.index("trainer")


def test_pure_rooms_do_without_heavy_libraries():
    for room, allowed in PURE.items():
        for path in (PACKAGE / room).rglob("*.py"):
            used = {name.partition(".")[0] for name in imports_of(path)} & HEAVY
            assert used <= allowed, f"{path.relative_to(PACKAGE)} imports {used - allowed}"
