"""The life of a run among faults: `python -m tests.chaos.driver FOLDER STEPS SEED LIFE_STEPS FAULTS_PER_LIFE OFTEN`.

Draws faults from a seed and starts the run again, from its newest checkpoint, after each fault that ends a process,
until the run has trained STEPS optimizer steps. Each process is forked from this one, which has imported everything.

Guarantees: every kind of fault falls before a kind falls again, as far as the engine and the scorer of a life allow,
but that those which cost no time fall OFTEN times as often;
`report.json` says which faults fell, how each process ended, and under `problems` whatever was not as it must be: a
process that ended otherwise than its fault has it end, or not at all, and processes, threads, files or shared memory
that are left. The processes themselves write `trace.jsonl`.
"""

import atexit
import ctypes
import faulthandler
import json
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.asked import misbehave_in_server
from tests.chaos.faults import ENDS, FAULTS, GOES_ON
from tests.chaos.life import live
from tests.distributed.launch import free_port
from tests.engines.vllm.stub_server import StubServer
from tests.test_killed_runs import read_trace
from tests.tiny import save_tiny_model

IN_WORKERS = Path(__file__).parent / "in_workers"
SHARED_MEMORY = Path("/dev/shm")
FILLER = SHARED_MEMORY / "filler"
PRIVATE_SHARED_MEMORY = "A3PO_TEST_PRIVATE_SHM"  # set where /dev/shm is small and this run's alone
LIFE_SECONDS, END_SECONDS = 180.0, 30.0
MOST_WITHOUT_PROGRESS = 12


class Deck:
    """Names in random order, each before any comes again."""

    def __init__(self, names, dice: random.Random):
        self._names, self._dice, self._left = list(names), dice, []

    def draw(self, fits=lambda name: True) -> str:
        found = next((name for name in self._left if fits(name)), None)
        if found is None:
            self._left += self._dice.sample(self._names, len(self._names))
            found = next(name for name in self._left if fits(name))
        self._left.remove(found)
        return found


def draw_life(dice: random.Random, ends: Deck, goes_on: Deck, life_steps: int, count: int) -> dict[str, Any]:
    """A life: where it runs, and which faults fall after how many steps. The last one ends it."""
    last = ends.draw()
    where = {"engine": FAULTS[last].engine, "scorer": FAULTS[last].scorer}
    names = []
    for _ in range(count):
        names.append(goes_on.draw(lambda name, where=where: _fits(FAULTS[name], where)))
        where = {key: value or getattr(FAULTS[names[-1]], key) for key, value in where.items()}
    where["engine"] = where["engine"] or dice.choice(["worker", "servers", "scripted"])
    where["scorer"] = where["scorer"] or dice.choice(["thread", "process"])
    steps = sorted(dice.randrange(1, life_steps) for _ in names)
    return where | {
        "reward_on_timeout": dice.choice([None, 0.5]) if where["scorer"] == "process" else None,
        "faults": [*zip(steps, names, strict=True), (life_steps, last)],
    }


def _fits(fault, where) -> bool:
    return all(getattr(fault, key) in (None, value) or value is None for key, value in where.items())


def run(folder: Path, steps: int, seed: int, life_steps: int, count: int, often: int) -> dict[str, Any]:
    dice, began = random.Random(seed), time.monotonic()
    names = [name for name, fault in GOES_ON.items() for _ in range(often if fault.is_quick else 1)]
    if PRIVATE_SHARED_MEMORY not in os.environ:
        names.remove("shared memory full")
    ends, goes_on = Deck(ENDS, dice), Deck(names, dice)
    problems: list[str] = []
    endings: Counter[str] = Counter()
    port, stuck = free_port(), 0
    server = _fork(lambda: _keep_serving(folder, port))
    try:
        while stuck < MOST_WITHOUT_PROGRESS:
            plan = draw_life(dice, ends, goes_on, life_steps, count)
            plan |= {"max_steps": steps, "urls": [f"http://127.0.0.1:{port}"]}
            lines, lives = len(read_trace(folder)), sum(endings.values())
            log = folder / "logs" / f"{lives}.log"
            how = _live_once(folder, plan, log)
            told = read_trace(folder)[lines:]
            found = [*_wrong_end(plan, how, told), *_left(told, server)]
            problems += [f"life {lives} ({plan['engine']}, {plan['scorer']}): {text}" for text in found]
            endings[str(how)] += 1
            if not found:
                log.unlink()
            takes = [line["take"] for line in told if "take" in line]
            stuck = 0 if takes and max(takes) > told[0]["start"] + 2 else stuck + 1
            trace = read_trace(folder)
            fallen = Counter(line["fault"] for line in trace if "fault" in line)
            report = {
                "steps": max((line["take"] for line in trace if "take" in line), default=0),
                "seconds": time.monotonic() - began,
                "lives": lives + 1,
                "endings": endings,
                "total": fallen.total(),
                "faults": {name: fallen[name] for name in FAULTS},
                "problems": problems,
            }
            (folder / "report.json").write_text(json.dumps(report, indent=1))
            if any("end" in line for line in told):
                return report
        problems.append(f"no progress in {stuck} lives")
        (folder / "report.json").write_text(json.dumps(report, indent=1))
        return report
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


# --- one process ----------------------------------------------------------------------------------------------------


def _live_once(folder: Path, plan: dict[str, Any], log: Path) -> int | str:
    """Exit code or negative signal of a process that lives `plan`; "hangs" if it had to be ended."""
    for path in folder.glob("*.fault"):
        path.unlink()
    FILLER.unlink(missing_ok=True)
    pid = _fork(lambda: live(folder, plan), log)
    deadline = time.monotonic() + LIFE_SECONDS + 2 * len(plan["faults"])
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGABRT)  # its stacks are in the log
    os.waitpid(pid, 0)
    return "hangs"


def _fork(action, log: Path | None = None) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if log is not None:
            log.parent.mkdir(exist_ok=True)
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)
            faulthandler.enable()
        action()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:  # as the interpreter ends
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _keep_serving(folder: Path, port: int) -> None:
    """A server, and another one whenever it has been killed."""
    while True:
        pid = _fork(lambda: _serve(folder, port))
        os.waitpid(pid, 0)
        time.sleep(0.2)


def _serve(folder: Path, port: int) -> None:
    _prctl(1, signal.SIGKILL)  # it ends with its parent
    server = StubServer(port=port, max_model_len=128)
    signal.signal(signal.SIGUSR1, lambda *_: misbehave_in_server(folder, server))
    new = folder / "server.pid.new"
    new.write_text(str(os.getpid()))
    new.replace(folder / "server.pid")
    while True:
        signal.pause()


def _prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


# --- what is checked after each process -----------------------------------------------------------------------------


def _wrong_end(plan: dict[str, Any], how: int | str, told: list[dict[str, Any]]):
    fallen = [line["fault"] for line in told if "fault" in line]
    error = next((line["error"] for line in told if "error" in line), "")
    if how == 0 and any("end" in line for line in told):
        return  # the run is done
    _, last = plan["faults"][-1]
    if last not in fallen:
        yield f"ended ({how}, {error}) after {fallen}, before {last!r} fell"
        return
    expected = ENDS[last].ends
    fits = error and re.search(expected, error) if isinstance(expected, str) else how == expected
    if not fits:
        yield f"ended ({how}, {error}) where {last!r} has it end with {expected!r}"


def _left(told: list[dict[str, Any]], server: int):
    yield from (f"left {line['left']}" for line in told if line.get("left"))
    deadline = time.monotonic() + END_SECONDS
    while others := _children(server):
        if time.monotonic() > deadline:
            yield f"left the processes {others}"
            for pid in others:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    FILLER.unlink(missing_ok=True)
    if PRIVATE_SHARED_MEMORY in os.environ and (segments := os.listdir(SHARED_MEMORY)):
        yield f"left the segments {segments}"


def _children(server: int) -> dict[int, str]:
    """Processes that are left: as this process adopts orphans, they are its children."""
    found = {}
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        if pid == server:
            continue
        if not os.waitpid(pid, os.WNOHANG)[0]:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def main() -> None:
    folder, numbers = Path(sys.argv[1]), map(int, sys.argv[2:])
    _prctl(36, 1)  # orphans become children of this process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
    sys.path.insert(0, str(IN_WORKERS))  # which workers inherit
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir(exist_ok=True)
    if not (folder / "model").is_dir():
        save_tiny_model(folder / "model", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    print(json.dumps(run(folder, *numbers), indent=1))


if __name__ == "__main__":
    main()
