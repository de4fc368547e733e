"""`trl-a3po watch` shows a run from its timeline, also while the file grows, is cut, or is written anew."""

import io
import json
import subprocess
import sys
import textwrap
import time

import nbclient
import nbformat
import pytest
from rich.console import Console

from tests.report.made_lines import FIRST, LINES, batch, group, span, start
from tests.runs import build
from trl_a3po.cli.diagnosis import diagnose
from trl_a3po.cli.main import main
from trl_a3po.report import timeline as timeline_module
from trl_a3po.report import watch as watching
from trl_a3po.report.run_process import _state, this_process
from trl_a3po.report.tail import Tail
from trl_a3po.report.timeline import NAME, OLDER, Timeline, read_timeline
from trl_a3po.report.watch import watch
from trl_a3po.report.watch_frame import watch_frame
from trl_a3po.report.watch_view import TAKES, watch_view
from trl_a3po.testing import StubEngine

SHARES = {"a3po/d0/fraction": 0.25, "a3po/d1/fraction": 0.75}
QUEUE = {"sampling": 2, "scoring": 1, "ready": 3, "capacity": 8, "blocked": 0.0, "restarts": 0}
END = {"kind": "end", "time": 60.0}


def logged(step, reward):
    return {"kind": "log", "time": 30.0, "logged": {"step": step, "reward": reward, **SHARES}}


def run_lines(end=True):
    """A run of four steps out of ten, in which the trainer waits for rewards half of the time."""
    lines = [start(max_steps=10, settings={"reward_workers": 1})]
    for step in range(4):
        at = 10.0 * step
        lines += [
            span("take", at, at + 5, **QUEUE, tokens=100 * step, busy=2.0 * step),
            *(
                {**group(at - 9, at - 8, at - 5 + i, at + 4 + i, at + 5), "prompt": 2 * step + i, "version": step}
                for i in range(2)
            ),
            {**span("step", at, at + 10), "version": step + 1},
            logged(step + 1, step / 10),
        ]
    return [*lines, END] if end else lines


def text_of(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def written(folder, lines):
    (folder / NAME).write_text(text_of(lines))
    return folder


def console(width=80, **options):
    return Console(file=io.StringIO(), width=width, height=24, **options)


def printed(view, width, **options):
    shown = console(width)
    shown.print(watch_frame(view, "outputs/a run", now=41.0, width=width, **options))
    return shown.file.getvalue().splitlines()


# --- reading a file that grows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_growing_file_is_read_like_a_whole_one(tmp_path, size):
    lines = run_lines()
    lines[3]["outcome"] = "failed: Ω…"  # characters of several bytes
    content = text_of(lines).encode()
    tail, file = Tail(tmp_path / NAME), (tmp_path / NAME).open("wb")
    assert not tail.read() and tail.lines == []
    for at in range(0, len(content), size):
        file.write(content[at : at + size])
        file.flush()
        tail.read()
        assert tail.lines == lines[: content[: at + size].count(b"\n")]
    assert tail.lines == lines == read_timeline(tmp_path)


def test_nothing_new_is_said(tmp_path):
    tail = Tail(written(tmp_path, [start(), *FIRST]) / NAME)
    assert tail.read()
    assert not tail.read()


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path):
    saved = {"kind": "checkpoint", "time": 40.0, "version": 2}
    first = [start(), *FIRST, saved, *batch(20.0)]
    tail = Tail(written(tmp_path, first) / NAME)
    tail.read()
    resumed = start(resumed=True) | {"version": 2}
    with (tmp_path / NAME).open("a") as file:
        file.write('{"kind": "step", "beg\n' + text_of([resumed, *batch(40.0)]))  # a kill has cut a line
    tail.read()
    assert tail.lines == read_timeline(tmp_path) == [start(), *FIRST, saved, resumed, *batch(40.0)]


def test_a_file_that_became_shorter_or_was_replaced_is_read_from_its_beginning(tmp_path):
    tail = Tail(written(tmp_path, [start(), *LINES]) / NAME)
    tail.read()
    written(tmp_path, [start(), *FIRST])
    tail.read()
    assert tail.lines == [start(), *FIRST]
    (tmp_path / "other").write_text(text_of([start(), *LINES, *LINES]))
    (tmp_path / "other").rename(tmp_path / NAME)
    tail.read()
    assert tail.lines == [start(), *LINES, *LINES]


@pytest.mark.parametrize("looks", [1, 3, 25])
def test_a_run_that_is_continued_in_another_file_is_read_whole(tmp_path, monkeypatch, looks):
    """`looks`: how many steps are written between two looks, of about nine that fit into a file."""
    monkeypatch.setattr(timeline_module, "MOST_BYTES", 1000)
    timeline, tail = Timeline(tmp_path / NAME, run="a", version=0, resumed=False), Tail(tmp_path / NAME)
    for version in range(1, 76):
        timeline.write("step", version=version)
        timeline.write("checkpoint", version=version)
        timeline.flush()
        if version % looks == 0:
            assert tail.read()
            assert tail.lines == read_timeline(tmp_path) and tail.lines[-1]["version"] == version
            assert len({line["version"] for line in tail.lines if line["kind"] == "step"}) >= min(version, 5)
    assert Tail(tmp_path / NAME).read() and not tail.read()


def test_a_file_that_becomes_the_older_one_while_it_is_opened_is_read_once(tmp_path):
    written(tmp_path, [start() | {"kind": "continued"}, *FIRST])
    (tmp_path / OLDER).hardlink_to(tmp_path / NAME)
    tail = Tail(tmp_path / NAME)
    assert tail.read() and tail.lines == [start(), *FIRST]


def test_a_file_that_is_no_timeline_is_named(tmp_path):
    (tmp_path / NAME).write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"Line 1 of .*timeline\.jsonl is not JSON"):
        Tail(tmp_path / NAME).read()


# --- what is shown ------------------------------------------------------------------------------------------------


def test_the_view_holds_the_numbers_of_the_lines():
    view = watch_view(run_lines(end=False))
    assert (view.step, view.max_steps, view.step_seconds, view.ended) == (4, 10, 10.0, False)
    assert view.rewards == [0.0, 0.1, 0.2, 0.3]
    assert view.staleness == {0: 0.25, 1: 0.75}
    assert view.tokens_per_second == 300 / 6.0
    assert view.outcomes == {"trained": 8}
    assert view.verdict.limit == "rewards"
    assert [slow.seconds for slow in view.slow_rewards] == [9.0] * 3 and view.stragglers == []


def test_a_long_run_is_judged_by_its_last_batches():
    waits, works = [], []
    for number in range(TAKES + 2):
        at = 10.0 * number
        for lines, waited in ((waits, 9.0), (works, 0.1)):
            lines += [
                span("take", at, at + waited),
                {**group(at, at + waited, at + waited, at + waited, at + waited), "prompt": number},
                span("step", at, at + 10.0),
            ]
    assert watch_view([start(), *waits]).verdict.limit == "generation"
    both = watch_view([start(), *waits, *works])
    assert both.verdict.limit != "generation"
    assert both.outcomes == {"trained": 2 * (TAKES + 2)}  # of all batches


def test_a_staleness_that_a_log_does_not_have_had_no_token_there():
    logs = [{"a3po/d0/fraction": 1.0}, {"a3po/d0/fraction": 0.5, "a3po/d1/fraction": 0.5}, {"reward": 1.0}]
    view = watch_view([start(), *FIRST, *({"kind": "log", "time": 1.0, "logged": log} for log in logs)])
    assert view.staleness == {0: 0.75, 1: 0.25}


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_frame_fits_into_a_small_terminal(width, ascii_only):
    lines = run_lines(end=False)
    many = {f"a3po/d{d}/fraction": 1 / 12 for d in range(12)}
    lines += [{"kind": "log", "time": 30.0, "logged": {"step": 5, "reward": 0.5, **many}}]
    lines += [{"kind": "warning", "time": 30.0, "text": "a long warning\n" * 20}]
    lines += [{"kind": "left_out", "time": 30.0, "row": n, "reason": f"reason {n}"} for n in range(9)]
    shown = printed(watch_view(lines), width, ascii_only=ascii_only)
    assert len(shown) <= 24
    assert max(map(len, shown)) <= width
    assert "\n".join(shown).isascii() or not ascii_only


def test_a_frame_says_how_far_the_run_is_and_what_limits_it():
    words = " ".join(" ".join(printed(watch_view(run_lines(end=False)), 100)).split())
    for part in (
        "outputs/a run running, last step 1.0 s ago",
        "step 4 of 10, 10 s each, 60 s left",
        "0.150 (mean of the last 4)",
        "training 50%, waiting 50%, publishing 0%",
        "2 sampling, 1 scoring, 3 ready, of 8 at most",
        "8 trained",
        "(1.0x)",
        "Reward-bound: ",
        "setting to change: reward_workers",
    ):
        assert part in words


def test_a_frame_says_how_many_rows_were_left_out_if_any_were():
    lines = run_lines(end=False)
    assert not any("left out" in line for line in printed(watch_view(lines), 100))
    lines += [{"kind": "left_out", "time": 30.0, "row": n, "reason": "with x" if n else "with y"} for n in range(3)]
    shown = [" ".join(line.split()) for line in printed(watch_view(lines), 100)]
    assert "left out 3 rows: 2 with x, 1 with y" in shown


def test_a_run_that_says_nothing_any_more_is_said_to_be_silent():
    assert "silent for 5 min" in printed_at(330.0)
    assert "running" in printed_at(35.0)
    assert "finished" in printed_at(330.0, end=True)


def test_a_run_that_an_error_ended_is_not_said_to_be_finished():
    lines = [*run_lines(end=False), {"kind": "end", "time": 400.0, "error": "ValueError: 1000 rows in a row"}]
    shown = "\n".join(printed(watch_view(lines), 100))
    assert "ended with ValueError" in shown and "1000 rows in a row" in shown
    assert "finished" not in shown


def printed_at(now, *, end=False):
    shown = console()
    shown.print(watch_frame(watch_view(run_lines(end)), "run", now, 80))
    return shown.file.getvalue()


def test_a_run_that_starts_is_said_to_start_and_not_to_be_silent():
    again = [*run_lines(), start(time=70.0, resumed=True, version=4)]
    for lines in ([start(time=70.0)], again):
        shown = console()
        shown.print(watch_frame(watch_view(lines), "run", 370.0, 80))
        assert "starting for 5 min, no step yet" in shown.file.getvalue()


def test_a_run_that_starts_its_engine_can_be_watched(model_path, tmp_path):
    class Starting(StubEngine):
        def start(self, *arguments):
            seen.append(printed(watch_view(read_timeline(tmp_path / "A3POTrainer")), 80)[0])
            super().start(*arguments)

    seen = []
    build(model_path, tmp_path, engine=Starting(lambda prompt, number: [5, 1]), max_steps=1).train()
    assert "starting for" in seen[0]


@pytest.mark.parametrize("lines", [[start()], [start(), *FIRST], [start(), *FIRST, END]])
def test_a_run_that_has_just_begun_can_be_watched(lines):
    assert any("after three batches" in line for line in printed(watch_view(lines), 80))


# --- the watch ----------------------------------------------------------------------------------------------------


def test_once_prints_one_frame_and_changes_nothing(tmp_path, capsys):
    written(tmp_path, run_lines(end=False))
    before = (tmp_path / NAME).stat()
    main(["watch", str(tmp_path), "--once"])
    shown = capsys.readouterr().out
    assert shown.count("Reward-bound") == 1 and "\x1b" not in shown
    assert (tmp_path / NAME).stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_folder_without_a_run_ends_with_a_sentence(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("")
    for folder in (tmp_path, tmp_path / "none", tmp_path / "none" / NAME):
        with pytest.raises(SystemExit) as ended:
            main(["watch", str(folder), "--once"])
        assert ended.value.code == 2
        assert "holds no timeline.jsonl: give the output_dir of a run." in capsys.readouterr().err


def test_once_says_of_a_run_that_is_built_and_has_not_begun_that_it_is_starting(model_path, tmp_path, capsys):
    trainer = build(model_path, tmp_path, max_steps=1)
    folder = tmp_path / "A3POTrainer"
    main(["watch", str(folder), "--once"])  # returns, so that the exit code is 0
    assert f"{folder} is starting" in capsys.readouterr().out and list(folder.iterdir()) == []
    trainer.train()
    main(["watch", str(folder), "--once"])
    assert "is starting" not in capsys.readouterr().out


def test_once_says_of_a_file_without_a_line_that_the_run_is_starting(tmp_path, capsys):
    for content in ("", '{"kind": "sta'):
        (tmp_path / NAME).write_text(content)
        for watched in (tmp_path, tmp_path / NAME):
            main(["watch", str(watched), "--once"])
            assert "is starting" in capsys.readouterr().out


@pytest.fixture
def writes_while_waiting(monkeypatch):
    """Has what is given to it done, one after the other, instead of each wait between two frames."""

    def have_done(*actions):
        remaining = iter(actions)
        monkeypatch.setattr(watching.time, "sleep", lambda seconds: next(remaining)())

    return have_done


def test_a_terminal_shows_a_run_from_before_its_beginning_to_its_end(tmp_path, writes_while_waiting):
    shown, lines = console(force_terminal=True), run_lines()
    file = (tmp_path / "later").open("w")

    def begin():
        (tmp_path / "later").rename(tmp_path / NAME)

    def write(some):
        file.write(text_of(some))
        file.flush()

    writes_while_waiting(begin, *(lambda n=n: write(lines[n : n + 7]) for n in range(0, len(lines), 7)))
    watch(tmp_path, console=shown)
    screen, _, after = shown.file.getvalue().rpartition("\x1b[?1049l")  # back from the alternate screen
    assert "waiting for the run to begin" in screen and "after three batches" in screen
    assert "finished" in after and "Reward-bound" in after


@pytest.fixture
def sleeper():
    """A process, and what a timeline says of it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process, this_process() | {"pid": process.pid, "started": _state(process.pid)[1]}
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("steps", [4, 0])
def test_a_killed_run_is_said_to_have_ended_at_once(tmp_path, capsys, sleeper, steps):
    process, described = sleeper
    begins = start(max_steps=10, time=time.time(), process=described)
    written(tmp_path, [begins, *run_lines(end=False)[1:]] if steps else [begins])
    main(["watch", str(tmp_path), "--once"])
    assert "ended" not in capsys.readouterr().out
    process.kill()
    process.wait()
    main(["watch", str(tmp_path), "--once"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "ended without saying so" in shown and "running" not in shown and "starting" not in shown
    when = "after optimizer step 4" if steps else "before its first optimizer step"
    assert f"The process was killed {when}: it is not there any more" in shown
    watch(tmp_path, console=console(force_terminal=True))  # returns
    assert f"PROBLEM: the process was killed {when}: it is not there any more" in diagnose(tmp_path)[0]


def test_a_run_that_ends_while_it_is_looked_at_is_not_said_to_have_been_killed(tmp_path, monkeypatch):
    def ends(process):
        with (tmp_path / NAME).open("a") as file:
            file.write(text_of([END]))
        return True

    monkeypatch.setattr(watching, "is_gone", ends)
    shown = console()
    watch(written(tmp_path, run_lines(end=False)), once=True, console=shown)
    assert "finished" in shown.file.getvalue() and "killed" not in shown.file.getvalue()


def test_a_run_on_another_machine_is_silent_and_not_said_to_have_been_killed(tmp_path, capsys):
    elsewhere = {"pid": 2**22 + 1, "started": 1, "machine": "another"}
    written(tmp_path, [start(max_steps=10, process=elsewhere), *run_lines(end=False)[1:]])
    main(["watch", str(tmp_path), "--once"])
    assert "silent for" in capsys.readouterr().out


def test_an_interrupt_ends_the_watch_quietly(tmp_path, writes_while_waiting):
    def interrupt():
        raise KeyboardInterrupt

    shown = console(force_terminal=True)
    writes_while_waiting(interrupt)
    watch(written(tmp_path, run_lines(end=False)), console=shown)
    assert shown.file.getvalue().count("\x1b[?1049h") == shown.file.getvalue().count("\x1b[?1049l") == 1


# --- in a notebook ------------------------------------------------------------------------------------------------


def outputs_of(cell, timeout=240):
    """What a cell shows in the end, as texts, where a frontend obeys `clear_output`."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(notebook, timeout=timeout).execute()
    return [output.get("text") or output["data"]["text/plain"] for output in notebook.cells[0].outputs]


def test_a_cell_shows_the_last_frame_alone_and_an_interrupted_cell_goes_on(tmp_path):
    """The run ends while it is watched; an interrupt ends the watch of another one, which has not."""
    (tmp_path / "other").mkdir()
    written(tmp_path / "other", run_lines(end=False))
    (tmp_path / "lines").write_text(text_of(run_lines()))
    cell = f"""
        import _thread, threading
        from pathlib import Path
        from trl_a3po.report import watch as watching
        watching.SECONDS = 0.2
        ends = lambda: Path({str(tmp_path / "lines")!r}).rename({str(tmp_path / NAME)!r})
        threading.Timer(1.0, ends).start()
        watching.watch({str(tmp_path)!r})
        threading.Timer(1.0, _thread.interrupt_main).start()
        watching.watch({str(tmp_path / "other")!r})
        print("after it")
    """
    frame, after = outputs_of(textwrap.dedent(cell))
    assert "Reward-bound" in frame and after == "after it\n"


def test_a_command_of_a_cell_prints_one_frame_and_says_how_to_see_more(tmp_path):
    written(tmp_path, run_lines(end=False))
    command = f"{sys.executable} -c 'from trl_a3po.cli.main import main; main()' watch {tmp_path}"
    [shown] = outputs_of(f"!{command}")
    assert shown.count("Reward-bound") == 1 and f"watch('{tmp_path}')" in shown


def test_one_frame_that_was_asked_for_is_all_that_a_cells_shell_shows(tmp_path, monkeypatch):
    for name, value in watching.SHELL_OF_A_CELL.items():
        monkeypatch.setenv(name, value)
    shown = console(force_terminal=True)
    watch(written(tmp_path, run_lines(end=False)), once=True, console=shown)
    assert "Reward-bound" in shown.file.getvalue() and "notebook" not in shown.file.getvalue()
