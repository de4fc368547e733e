"""`trl-a3po watch RUN`: what a run does and what limits it, on a terminal or in a notebook, while it goes on.

Guarantees: only reads files of the run, and asks the system whether its process is there; the terminal is left as it
was.
"""

import os
import time
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from trl_a3po.report.run_process import is_gone
from trl_a3po.report.tail import Tail
from trl_a3po.report.timeline import NAME
from trl_a3po.report.watch_frame import watch_frame
from trl_a3po.report.watch_view import WatchView, watch_view

SECONDS = 1.0  # between two frames
SHELL_OF_A_CELL = {"TERM": "xterm-color", "CLICOLOR_FORCE": "1", "PAGER": "cat", "GIT_PAGER": "cat"}
"""What ipykernel sets for commands that a cell runs with `!`. They have a terminal, of which the cell shows everything
one below the other."""
ONE_FRAME = (
    "This is one frame, because the cell of a notebook cannot show a command's screen. In the cell itself, "
    "`from trl_a3po.report.watch import watch; watch({run!r})` goes on until the run ends."
)

STARTING = (
    "{run} is starting: there is no step to show yet. {name} is there as soon as train() starts the engine, and a "
    "terminal waits for it without --once."
)


def watch(run: str | Path, *, once: bool = False, console: Console | None = None) -> None:
    """Show a run until it ends. Ctrl-C, or interrupting the cell of a notebook, ends the watch and not the run.

    Args:
        run: the run's `output_dir`, or its `timeline.jsonl`. A run that has not begun in this folder is waited for.
        once: show one frame and return; so does a console that is no terminal, such as a pipe, or the shell of a
            notebook's cell. Of a run that has not begun, the frame says that it is starting.
        console: where to show it.

    Raises:
        FileNotFoundError: there is no such folder, or, with `once`, one that holds something else than a run.
        ValueError: the file is not a timeline.
    """
    console = console or Console()
    path = Path(run)
    in_cells_shell = not console.is_jupyter and SHELL_OF_A_CELL.items() <= os.environ.items()
    wants_more, once = not once, once or in_cells_shell or not (console.is_terminal or console.is_jupyter)
    seen = _Run(path if path.suffix == ".jsonl" else path / NAME)
    if not seen.begun and not (_may_begin(path) if once else path.is_dir()):
        raise FileNotFoundError(f"{run} holds no {NAME}: give the output_dir of a run.")
    try:
        if once:
            _print_frame(seen, console, str(run), wants_more=wants_more and in_cells_shell)
        elif console.is_jupyter:
            _in_notebook(seen, console)
        else:
            _on_terminal(seen, console)
    except KeyboardInterrupt:
        return


def _may_begin(path: Path) -> bool:
    """Whether a run may be about to begin in this folder: a trainer makes it when it is built, and the first files are
    written when `train` begins."""
    timeline = path if path.suffix == ".jsonl" else path / NAME
    return timeline.is_file() or (path.is_dir() and not any(path.iterdir()))


class _Run:
    """A run that is watched."""

    def __init__(self, path: Path):
        self._tail = Tail(path)
        self._view: WatchView | None = None
        self._gone = False
        self.look()

    @property
    def begun(self) -> bool:
        return self._view is not None

    @property
    def ended(self) -> bool:
        return self._gone or (self._view is not None and self._view.ended)

    def look(self) -> None:
        """See what has been written since the last look, and whether the process is still there."""
        self._read()
        if self._has_ended_silently():
            self._read()  # it may have written its last line meanwhile
        self._gone = self._has_ended_silently()

    def _read(self) -> None:
        if self._tail.read():
            self._view = watch_view(self._tail.lines)

    def _has_ended_silently(self) -> bool:
        return self._view is not None and not self._view.ended and is_gone(self._view.process)

    def frame(self, console: Console) -> RenderableType:
        if self._view is None:
            return f"{self._tail.path} is not there yet: waiting for the run to begin."
        options = console.options
        name = str(self._tail.path.parent)
        return watch_frame(
            self._view, name, time.time(), options.max_width, ascii_only=options.ascii_only, gone=self._gone
        )


def _print_frame(seen: _Run, console: Console, run: str, *, wants_more: bool) -> None:
    tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if not seen.begun:
        tell(STARTING.format(run=run, name=NAME))
        return
    console.print(seen.frame(console))
    if wants_more:
        tell(f"\n{ONE_FRAME.format(run=run)}")


def _on_terminal(seen: _Run, console: Console) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(seen.frame(console), refresh=True)
            if seen.ended:
                break
            time.sleep(SECONDS)
            seen.look()
    console.print(seen.frame(console))


def _in_notebook(seen: _Run, console: Console) -> None:
    from IPython.display import clear_output

    while True:
        clear_output(wait=True)  # type: ignore[no-untyped-call]  # IPython's
        console.print(seen.frame(console))
        if seen.ended:
            break
        time.sleep(SECONDS)
        seen.look()
