"""The errors in what a run has printed: tracebacks, and error lines of this package without one.

Guarantees: pure; tracebacks of ranks (`[rank0]: …`) are read line by line of their own rank; a traceback that a worker
printed belongs to the error that quotes it; a launcher's error, a `TeamError` and a connection that another process
has closed follow from another process's error, which is named instead if it is there; an error before a training that
came to its end did not end the run.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import trl_a3po.errors
from trl_a3po.errors import TeamError

OURS = {name: kind for name, kind in vars(trl_a3po.errors).items() if isinstance(kind, type)}
QUOTES = "It printed:"  # the end of the first line of an error that quotes a worker's output
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = r"(?:[\[(][^\])]*[\])]:? ?)*"  # [rank1]:, and [default1]:[rank1]: with --tee of torchrun
_HEADER = re.compile(rf"^(?:\^C)*(?P<rank>{_PREFIX})\s*Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_ERROR = re.compile(r"^(?:[\w<>]+\.)*(?P<kind>[A-Za-z_]\w*)(?:: ?(?P<message>.*))?$")
_OUR_ERROR = re.compile(rf"^{_PREFIX}(?:\w+\.)*(?P<kind>{'|'.join(OURS)}): (?P<message>.*)$")
_LIBRARY = re.compile(
    r"[\\/](?:site|dist)-packages[\\/]|[\\/]lib[\\/]python3|^<(?!stdin|ipython)|[\\/]bin[\\/][^\\/.]+$"
)
_PACKAGE = re.compile(r"[\\/]trl_a3po[\\/]")
_RANK = re.compile(r"rank ?(\d+)")
_ROOT_CAUSE = re.compile(r"^Root Cause.*\n(?:.*\n){0,4}?\s*rank\s*: (\d+)", re.MULTILINE)  # as torchrun says it
_OF_ANOTHER = re.compile(
    r"connection (?:closed|reset) by peer|communicator was aborted|timed out waiting|broken pipe", re.IGNORECASE
)  # what gloo and NCCL say in a process whose partner has ended
_ENDED = "train_runtime"  # in the Trainer's last line
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
        rank: of the process, `None` where its lines do not begin with it.
    """

    kind: str | None
    message: str
    frames: tuple[Frame, ...] = ()
    quoted: "LoggedError | None" = None
    rank: int | None = None

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
        return int(self.kind == TeamError.__name__ or _OF_ANOTHER.search(self.message) is not None)

    def __str__(self) -> str:
        if self.kind is None:
            return "a traceback whose end is missing"
        return f"{self.kind}: {self.message}" if self.message else self.kind


def last_error(text: str) -> LoggedError | None:
    """The error that ended a run, `None` if its log has none."""
    text = _COLOURS.sub("", text)
    text = text[max(0, text.rfind(_ENDED)) :]
    found = _with_quoted(list(_errors(text.splitlines())))
    first = _ROOT_CAUSE.search(text)
    of_the_first = [error for error in found if first is not None and error.rank == int(first[1])]
    found = of_the_first or found
    nearest = min((error.distance for error in found), default=0)
    return next((error for error in reversed(found) if error.distance == nearest), None)


def came_to_its_end(text: str) -> bool:
    """Whether the log is that of a training that came to its end."""
    return _ENDED in text


def _errors(lines: Sequence[str]) -> Iterator[LoggedError]:
    """All errors in the order of their last lines."""
    ends: dict[int, LoggedError] = {}
    for number, line in enumerate(lines):
        if match := _HEADER.match(line):
            end, error = _traceback(lines, number + 1, match["rank"])
            rank = _RANK.search(match["rank"])
            ends[end] = replace(error, rank=None if rank is None else int(rank[1]))
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
