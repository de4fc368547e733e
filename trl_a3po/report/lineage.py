"""The lines of a timeline that belong together, from a file that holds several processes of a run, or several runs.

Guarantees: lines are added one at a time, so that a file can be read while it grows; what an earlier process did after
the checkpoint that the next one resumed from is left out.
"""

import json
from pathlib import Path
from typing import Any


class Lineage:
    """The run that was started or resumed last among the lines added so far.

    Args:
        path: the file, for messages.

    Attributes:
        lines: of this run, in the order in which they were written.
    """

    def __init__(self, path: Path):
        self.lines: list[dict[str, Any]] = []
        self._path = path
        self._added = 0
        self._cut: ValueError | None = None
        self._run: str | None = None
        self._runs: dict[str | None, list[dict[str, Any]]] = {}
        self._saved: dict[tuple[str | None, int], tuple[list[dict[str, Any]], int]] = {}  # checkpoints, lines so far

    def add(self, text: str) -> None:
        """Add a line of the file.

        Raises:
            ValueError: the line is not one of a timeline, or the line before was not, although no kill can have cut
                it: a kill cuts the last line of a process.
        """
        self._added += 1
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            cut = ValueError(f"Line {self._added} of {self._path} is not JSON ({error}): give a {self._path.name}.")
            if self._cut is not None:
                raise self._cut from error
            self._cut = cut
            return
        if not (isinstance(line, dict) and all(isinstance(line.get(name), of) for name, of in _facts_of(line))):
            raise ValueError(
                f"Line {self._added} of {self._path} is not a line of a run's timeline: give a {self._path.name}."
            )
        if self._cut is not None and line["kind"] != "start":
            raise self._cut
        self._cut = None
        if line["kind"] == "continued":
            if line.get("run") in self._runs:
                return
            line["kind"] = "start"  # the first lines were in a file that is gone
            self._run = line.get("run")
            self._runs[self._run] = self.lines
        elif line["kind"] == "start":
            self._begin(line)
        self.lines.append(line)
        if line["kind"] == "checkpoint":
            self._saved[self._run, line["version"]] = self.lines, len(self.lines)

    def _begin(self, start: dict[str, Any]) -> None:
        """Go on after the checkpoint that a process starts from."""
        known: list[dict[str, Any]] = []
        self._run = start.get("run")
        if start["resumed"]:  # all of the run where no line says when the checkpoint was saved
            lines, count = self._saved.get((self._run, start["version"]), (self._runs.get(self._run, []), None))
            known = lines[:count]
        self.lines = self._runs[self._run] = known


def _facts_of(line: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the lineage of a line depends on, and its type."""
    facts: dict[Any, list[tuple[str, Any]]] = {
        "start": [("version", int), ("resumed", bool), ("run", str | None)],
        "checkpoint": [("version", int)],
        "continued": [("run", str | None)],
        "log": [("logged", dict | None)],
    }
    kind = line.get("kind")
    return [("kind", str), *(facts.get(kind, []) if isinstance(kind, str) else [])]
