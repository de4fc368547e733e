"""`trl-a3po doctor LOG`: which error a log ends with, where it was raised, and what is known of it."""

import subprocess
import sys
import traceback

import pytest

from trl_a3po.cli.diagnosis import diagnose
from trl_a3po.cli.log_errors import last_error

SITE = "/venv/lib/python3.11/site-packages"


def trace(error, *files, rank=""):
    lines = ["Traceback (most recent call last):"]
    for number, file in enumerate(files):
        lines += [f'  File "{file}", line {number + 10}, in work', "    call()", "    ^^^^^^"]
    return "".join(f"{rank}{line}\n" for line in [*lines, error])


TRAIN, OURS, TORCH = "/home/me/train.py", f"{SITE}/trl_a3po/checks/data.py", f"{SITE}/torch/nn/functional.py"
RUN = f"{SITE}/torch/distributed/run.py"
LAUNCHER = trace("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "/venv/bin/torchrun", RUN)
QUOTED = "trl_a3po.errors.EngineError: The engine's worker ended (exit code 1) before it was ready. It printed:"


def findings(tmp_path, text):
    log = tmp_path / "run.log"
    log.write_text(text)
    return diagnose(log)


@pytest.mark.parametrize(
    ("text", "problem", "known"),
    [
        (
            "step 1\n" + trace("ValueError: 1000 rows in a row are left out.", TRAIN, OURS) + "wandb: synced\n",
            f"ValueError: 1000 rows in a row are left out. ({OURS}, line 11, in work)",
            "ValueError: trl_a3po refuses a setting, the data or an argument.",
        ),
        (
            trace("KeyError: 'answer'", OURS, TRAIN),
            f"KeyError: 'answer' ({TRAIN}, line 11, in work)",
            "KeyError: your own code raised it",
        ),
        (
            trace("RuntimeError: size mismatch", TRAIN, TORCH),
            f"RuntimeError: size mismatch (raised below {TRAIN}, line 10, in work)",
            f"RuntimeError: a library raised it, in {TORCH}, line 11, in work.",
        ),
        (
            trace("AttributeError: 'NoneType' object has no attribute 'x'", TRAIN, OURS),
            f"AttributeError: 'NoneType' object has no attribute 'x' ({OURS}, line 11, in work)",
            "AttributeError: trl_a3po does not raise this on purpose: report it",
        ),
        (
            trace("torch.OutOfMemoryError: CUDA out of memory.", TRAIN, OURS, TORCH),
            f"OutOfMemoryError: CUDA out of memory. (raised below {OURS}, line 11, in work)",
            "OutOfMemoryError: a GPU has no memory left. Lower per_device_train_batch_size",
        ),
        (
            trace("KeyboardInterrupt", TRAIN, TORCH),
            f"KeyboardInterrupt (raised below {TRAIN}, line 10, in work)",
            "KeyboardInterrupt: somebody pressed Ctrl-C",
        ),
        (
            trace("trl_a3po.errors.StallError: Nothing has happened for 600 s.", TRAIN, OURS),
            f"StallError: Nothing has happened for 600 s. ({OURS}, line 11, in work)",
            "StallError: Raised after `stall_timeout` seconds",
        ),
        (
            trace("ValueError: no", TRAIN).rpartition("ValueError")[0],
            f"a traceback whose end is missing ({TRAIN}, line 10, in work)",
            "The text ends before",
        ),
    ],
)
def test_a_traceback_is_named_with_its_last_frame_of_interest(tmp_path, text, problem, known):
    first, second, *more = findings(tmp_path, text)
    assert first == f"PROBLEM: {problem}"
    assert second.startswith(known) and not more


def test_the_last_of_several_errors_is_named():
    both = (
        trace("OSError: first", TRAIN) + "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    assert str(last_error(both + trace("RuntimeError: second", TRAIN))) == "RuntimeError: second"


def test_what_follows_from_another_process_is_not_the_cause():
    cause = trace("ValueError: bad row", TRAIN, OURS, rank="[rank1]: ")
    other = trace("trl_a3po.errors.TeamError: rank 1 has failed.", TRAIN, OURS, rank="[rank0]: ")
    assert str(last_error(cause + other + LAUNCHER)) == "ValueError: bad row"
    assert str(last_error(other + LAUNCHER)) == "TeamError: rank 1 has failed."
    assert last_error(LAUNCHER).kind == "ChildFailedError"


def test_tracebacks_of_two_ranks_that_were_printed_at_the_same_time_are_told_apart():
    one = trace("ValueError: of one", TRAIN, rank="[rank1]: ").splitlines()
    other = trace("trl_a3po.errors.TeamError: of another", OURS, rank="[rank0]: ").splitlines()
    mixed = "\n".join(line for pair in zip(one, other, strict=True) for line in pair)
    assert str(last_error(mixed)) == "ValueError: of one"
    assert [frame.file for frame in last_error(mixed).frames] == [TRAIN]


def test_a_workers_traceback_belongs_to_the_error_that_quotes_it(tmp_path):
    worker = trace("ModuleNotFoundError: No module named 'vllm'", f"{SITE}/trl_a3po/engines/worker_loop.py")
    problem, advice, printed = findings(tmp_path, trace(QUOTED, TRAIN, OURS) + worker)
    assert problem == f"PROBLEM: {QUOTED.removeprefix('trl_a3po.errors.')} ({OURS}, line 11, in work)"
    assert advice.startswith("EngineError: ")
    assert printed.startswith("The worker printed ModuleNotFoundError: No module named 'vllm' (")


def test_a_text_without_an_error_says_so(tmp_path):
    (finding,) = findings(tmp_path, "step 1\nstep 2\nTypeErrors are rare.\n")
    assert finding.startswith("PROBLEM: the log ends before the training does, and holds no traceback")
    (finding,) = findings(tmp_path, " \n")
    assert finding == "PROBLEM: the log is empty: give what the run printed."


ENDED = "{'train_runtime': '21.3', 'train_loss': '0.1'}\n"


def test_an_error_that_the_training_has_survived_is_not_what_ended_it(tmp_path):
    survived = trace("ModuleNotFoundError: No module named 'wandb'", TRAIN, TORCH) + "step 1\n" + ENDED
    assert findings(tmp_path, survived) == ["The training in the log came to its end, and no error follows."]
    assert str(last_error(survived + trace("OSError: No space left on device", TRAIN))).startswith("OSError")


def test_a_traceback_behind_the_terminals_ctrl_c_is_read():
    assert str(last_error("step 3\n^C" + trace("KeyboardInterrupt", TRAIN))) == "KeyboardInterrupt"


@pytest.mark.parametrize(
    "followed",
    [
        "RuntimeError: Connection closed by peer [127.0.0.1]:34",
        "torch.distributed.DistBackendError: Timed out waiting",
    ],
)
@pytest.mark.parametrize(
    ("first", "second"),
    [("[rank1]: ", "[rank0]: "), ("[default1]:[rank1]: ", "[default0]:[rank0]: "), ("", "")],
    ids=["ranks", "tee", "plain"],
)
def test_what_the_partners_of_a_failed_process_say_is_not_named(followed, first, second):
    text = trace("KeyError: 'reward_mean'", TRAIN, rank=first) + trace(followed, TORCH, rank=second)
    assert str(last_error(text)) == "KeyError: 'reward_mean'"


def test_the_rank_that_torchrun_names_is_believed():
    root = "Root Cause (first observed failure):\n[0]:\n  time      : now\n  rank      : 1 (local_rank: 1)\n"
    text = trace("KeyError: 'a'", TRAIN, rank="[rank1]: ") + trace("ValueError: later", TRAIN, rank="[rank0]: ") + root
    assert str(last_error(text)) == "KeyError: 'a'"
    assert str(last_error(text.removesuffix(root))) == "ValueError: later"


def test_pythons_own_tracebacks_are_read(tmp_path):
    """Of this interpreter, with everything that it adds to the lines."""
    script = tmp_path / "own.py"
    script.write_text("def work(rows):\n    return rows[0]['answer'] + 1\n\nwork([{}])\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    error = last_error(run.stderr)
    assert (str(error), str(error.last_frame)) == ("KeyError: 'answer'", f"{script}, line 2, in work")
    try:
        raise ValueError("a\nb")
    except ValueError:
        assert str(last_error(traceback.format_exc())) == "ValueError: a"
