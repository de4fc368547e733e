"""The errors in what a run has printed: tracebacks, and error lines of this package without one.

Guarantees: pure; tracebacks of ranks (`[rank0]: …`) are read line by line of their own rank; a traceback that a worker
printed belongs to the error that quotes it; a launcher's error and a `TeamError` follow from another process's error,
which is named instead if it is there.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import trl_a3po.errors
from trl_a3po.errors import TeamError

OURS = {name: kind for name, kind in vars(trl_a3po.errors).items() if isinstance(kind, type)}
QUOTES = "It printed:"  # the end of the first line of an error that quotes a worker's output
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_HEADER = re.compile(r"^(?P<rank>(?:[\[(][^\])]*[\])]:? ?)?)\s*Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_ERROR = re.compile(r"^(?:[\w<>]+\.)*(?P<kind>[A-Za-z_]\w*)(?:: ?(?P<message>.*))?$")
_OUR_ERROR = re.compile(rf"^(?:[\[(][^\])]*[\])]:? ?)?(?:\w+\.)*(?P<kind>{'|'.join(OURS)}): (?P<message>.*)$")
_LIBRARY = re.compile(
    r"[\\/](?:site|dist)-packages[\\/]|[\\/]lib[\\/]python3|^<(?!stdin|ipython)|[\\/]bin[\\/][^\\/.]+$"
)
_PACKAGE = re.compile(r"[\\/]trl_a3po[\\/]")
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "SystemExit")  # where no frame is the user's or ours


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str | None

    @property
    def is_ours(self) -> bool:
        return _PACKAGE.search(self.file) is not None

    @property
    def is_of_a_library(self) -> bool:
        return not self.is_ours and _LIBRARY.search(self.file) is not None

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" + (f", in {self.function}" if self.function else "")


@dataclass(frozen=True)
class LoggedError:
    """
    Args:
        kind: the name of its class, without the module; `None` where the text ends before it.
        message: its first line.
        frames: of its traceback, the outermost first; none without a traceback.
        quoted: the error of a worker whose output it quotes.
    """

    kind: str | None
    message: str
    frames: tuple[Frame, ...] = ()
    quoted: "LoggedError | None" = None

    @property
    def last_frame(self) -> Frame | None:
        """The last frame in the user's code or in this package."""
        return next((frame for frame in reversed(self.frames) if not frame.is_of_a_library), None)

    @property
    def distance(self) -> int:
        """From the cause: 0 for what may be the cause, 1 for what another process of the run has caused, 2 for what a
        launcher says of its processes."""
        if self.kind in _OF_LAUNCHERS and self.last_frame is None:
            return 2
        return int(self.kind == TeamError.__name__)

    def __str__(self) -> str:
        if self.kind is None:
            return "a traceback whose end is missing"
        return f"{self.kind}: {self.message}" if self.message else self.kind


def last_error(text: str) -> LoggedError | None:
    """The error that a log ends with, `None` if it has none."""
    found = _with_quoted(list(_errors(_COLOURS.sub("", text).splitlines())))
    nearest = min((error.distance for error in found), default=0)
    return next((error for error in reversed(found) if error.distance == nearest), None)


def _errors(lines: Sequence[str]) -> Iterator[LoggedError]:
    """All errors in the order of their last lines."""
    ends: dict[int, LoggedError] = {}
    for number, line in enumerate(lines):
        if match := _HEADER.match(line):
            end, error = _traceback(lines, number + 1, match["rank"])
            ends[end] = error
        elif number not in ends and (match := _OUR_ERROR.match(line)):
            ends[number] = LoggedError(match["kind"], match["message"])
    yield from (ends[number] for number in sorted(ends))


def _traceback(lines: Sequence[str], begin: int, rank: str) -> tuple[int, LoggedError]:
    """The error whose frames begin at a line, and the number of the line that says what it is."""
    frames: list[Frame] = []
    for number in range(begin, len(lines)):
        if not lines[number].startswith(rank):
            continue  # of another rank
        line = lines[number][len(rank) :]
        if match := _FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        elif not line.startswith(" "):
            match = _ERROR.match(line.rstrip())
            if match is None:
                return number, LoggedError(None, "", tuple(frames))
            return number, LoggedError(match["kind"], match["message"] or "", tuple(frames))
    return len(lines), LoggedError(None, "", tuple(frames))


def _with_quoted(errors: list[LoggedError]) -> list[LoggedError]:
    """The errors, of which those that another one quotes are not on their own."""
    found: list[LoggedError] = []
    for error in errors:
        before = found[-1] if found else None
        quotes = before is not None and before.kind in OURS and before.message.endswith(QUOTES)
        if before is not None and quotes and before.quoted is None and error.kind not in OURS:
            found[-1] = replace(before, quoted=error)
        else:
            found.append(error)
    return found
