"""`trl-a3po doctor`: broken set-ups and broken runs, each with the sentence that helps."""

import json
import os
import re
import sys

import pytest

from recipes import limits
from tests.test_cli import OWN, RECIPE
from trl_a3po.checkpoints import checkpoint
from trl_a3po.cli.beside_measured import beside_measured
from trl_a3po.cli.main import main
from trl_a3po.cli.smoke import save_smoke_model
from trl_a3po.planning.finished_run import finished_run
from trl_a3po.planning.forecast import forecast
from trl_a3po.planning.rates import EngineSpeed, Rates
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split, simulate
from trl_a3po.planning.workload import Geometric, Workload
from trl_a3po.report.run_process import this_process
from trl_a3po.report.timeline import read_timeline

BAD = (
    OWN
    + """
import math, time

def raises(completion_ids, **kwargs):
    raise KeyError("answer")

def too_few(completion_ids, **kwargs):
    return [0.0]

def infinite(completion_ids, **kwargs):
    return [math.inf] * len(completion_ids)

def slow(completion_ids, **kwargs):
    time.sleep(1.5)
    return [0.0] * len(completion_ids)

def slow_at_first(completion_ids, calls=[], **kwargs):
    calls.append(0)
    time.sleep(1.5 if len(calls) == 1 else 0.0)
    return [0.0] * len(completion_ids)

def hangs(completion_ids, **kwargs):
    time.sleep(30)

def accuracy(completion_ids, solution, **kwargs):
    return [float(answer in ids) for ids, answer in zip(completion_ids, solution)]

def parses(completion_ids, **kwargs):
    import signal

    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(0)
    return [1.0] * len(completion_ids)
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    save_smoke_model(folder / "model")
    (folder / "own.py").write_text(BAD)
    (folder / "file").write_text("")
    text = RECIPE.format(model=folder / "model", output=folder / "out").replace("reward_workers: 1\n", "")
    (folder / "recipe.yaml").write_text(text + "use_cpu: true\n")
    (folder / "broken.yaml").write_text("output_dir: [")
    return folder


def doctor(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, arguments)])
    return ended.value.code, capsys.readouterr().out


def test_a_set_up_that_works_has_no_problem(folder, capsys):
    code, printed = doctor(capsys, folder / "recipe.yaml")
    assert code == 0, printed
    assert "trl-a3po: " in printed and "GiB free" in printed and "optimizer steps stale" in printed
    assert "rewards: even_tokens scored a group in" in printed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("--max_stalness 2", "there is no option '--max_stalness'; is it '--max_staleness'?"),
        ("--max_staleness -1", "max_staleness=-1 must be"),
        ("--schedule fixed_lag --num_generations 3", "generation_batch_size"),
        ("--reward_funcs own.py:nothing", "has no function 'nothing'"),
        ("--reward_funcs own.py:raises", "KeyError"),
        ("--reward_funcs own.py:too_few", "4"),
        ("--reward_funcs own.py:infinite", "inf"),
        ("--reward_funcs own.py:hangs --reward_timeout 1", "set reward_workers=1 or more and a reward_timeout"),
        ("--dataset_function own.py:missing", "has no function 'missing'"),
        ("--model_name_or_path /no/such/model", "/no/such/model"),
        ("--load_in_4bit true", "set use_peft: true"),
        ("--engine vllm --vllm_server_urls http://127.0.0.1:9", "could not be reached"),
        ("--output_dir {folder}/file/out", "cannot be written"),
        ("--proximal_method reuse --num_iterations 2", "proximal_method='reuse'"),
    ],
)
def test_a_broken_set_up_is_explained(folder, capsys, settings, words):
    code, printed = doctor(capsys, folder / "recipe.yaml", *settings.format(folder=folder).split())
    assert code == 1, printed
    assert words in printed[printed.index("PROBLEM") :]


# --- set-ups and runs that others reported as broken, in small ------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # https://github.com/huggingface/open-r1/issues/249: seven rows, groups of eight
        (
            "--per_device_train_batch_size 7 --gradient_accumulation_steps 1 --num_generations 8",
            r"generation_batch_size.*7.*num_generations.*8",
        ),
        # https://github.com/modelscope/ms-swift/issues/3980: one completion a prompt has no advantage
        ("--num_generations 1", r"at least 2 generations per prompt"),
        # https://github.com/huggingface/open-r1/issues/543: the client waits for a server that is not there
        ("--engine vllm --vllm_server_urls http://127.0.0.1:9", r"could not be reached.*Start the server"),
        # https://github.com/FareedKhan-dev/train-deepseek-r1/issues/2: the dataset has no such column
        ("--reward_funcs own.py:accuracy", r"'accuracy'.*solution"),
        # https://github.com/huggingface/open-r1/issues/658: the verifier of an answer never returns
        ("--reward_funcs own.py:hangs --reward_timeout 1", r"hangs did not return within 1 s: set reward_workers"),
        # https://github.com/NovaSky-AI/SkyRL/issues/1315: proximal policy = current policy, so nothing is clipped
        ("--proximal_method reuse --num_iterations 2", r"proximal_method='reuse'.*num_iterations"),
        # https://github.com/meta-pytorch/torchforge/issues/557: the bound on age lets no batch ever be filled
        ("--max_staleness 1 --weight_sync_steps 8", r"weight_sync_steps=8.*max_staleness"),
    ],
)
def test_a_set_up_that_others_reported_is_explained(folder, capsys, settings, words):
    code, printed = doctor(capsys, folder / "recipe.yaml", *settings.split())
    assert code == 1, printed
    assert re.search(words, printed[printed.index("PROBLEM") :], re.DOTALL), printed[printed.index("PROBLEM") :]


def test_a_verifier_that_needs_a_main_thread_has_one(folder, capsys):
    # https://github.com/huggingface/Math-Verify/issues/55: signal only works in main thread
    code, printed = doctor(capsys, folder / "recipe.yaml", "--reward_funcs", "own.py:parses")
    assert code == 0 and "rewards: parses scored a group" in printed


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        # https://github.com/huggingface/trl/issues/5697: rewards are 0, because every completion is cut off
        ({"logged": {"completions/clipped_ratio": 1.0, "reward": 0.0}}, "raise max_completion_length"),
        # https://github.com/modelscope/ms-swift/issues/4570: loss and gradient are 0 from the first step on
        ({"logged": {"frac_reward_zero_std": 1.0, "loss": 0.0, "grad_norm": 0.0}}, "all rewards are equal"),
        # https://github.com/modelscope/ms-swift/issues/3136: grad_norm is NaN late in training
        ({"logged": {"grad_norm": float("nan")}}, "lower learning_rate"),
        # https://github.com/alibaba/ROLL/issues/394: generation and training take turns
        ({"taken": 0.9}, "Generation-bound: the trainer waited 90% of the time"),
    ],
)
def test_a_run_that_others_reported_is_explained(tmp_path, capsys, facts, words):
    code, printed = doctor(capsys, timeline(tmp_path, **facts))
    assert words in printed and code == int("PROBLEM" in printed)


def test_a_checkpoint_cut_short_is_named_beside_the_one_to_resume(tmp_path, capsys):
    # https://github.com/huggingface/transformers/issues/35782: the last checkpoint was not written to its end
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        checkpoint.begin(folder)
        checkpoint.write_json(folder / checkpoint.STATE, {"step": step})
        checkpoint.complete(folder, step)
    (tmp_path / "checkpoint-2" / checkpoint.STATE).unlink()
    code, printed = doctor(capsys, tmp_path)
    assert code == 1 and "checkpoint-1 is whole and can be resumed" in printed
    assert f"checkpoint-2 lacks {checkpoint.STATE}" in printed


def test_a_producer_that_died_is_named_in_what_the_run_printed(tmp_path, capsys):
    # https://github.com/NVIDIA-NeMo/RL/issues/3488: the trainer polled an empty buffer for hours
    log = tmp_path / "run.log"
    log.write_text(
        "trl_a3po.errors.EngineError: The engine's worker ended (SIGKILL, which is also what the system does when "
        "memory runs out) after it had been restarted engine_restarts=3 times. It printed:\n(nothing)\n"
    )
    code, printed = doctor(capsys, log)
    assert code == 1 and "memory runs out" in printed and "samples the prompts again" in printed


def test_a_recipe_that_is_not_yaml_is_explained(folder, capsys):
    code, printed = doctor(capsys, folder / "broken.yaml")
    assert code == 1 and "is not YAML" in printed


def test_a_slow_reward_is_a_warning(folder, capsys):
    code, printed = doctor(capsys, folder / "recipe.yaml", "--reward_funcs", "own.py:slow")
    assert code == 0 and "WARNING: slow took" in printed and "set reward_workers=" in printed


def test_a_reward_is_not_slow_because_of_what_its_first_call_starts(folder, capsys):
    code, printed = doctor(capsys, folder / "recipe.yaml", "--reward_funcs", "own.py:slow_at_first")
    assert code == 0 and "rewards: slow_at_first scored a group in 0.0" in printed


def timeline(
    folder, *lines, steps=4, end=True, taken=0.1, scoring=0.0, logged=None, outcome="trained", error=None, process=None
):
    start = {"kind": "start", "time": 0.0, "run": "r", "version": 0, "resumed": False, "schedule": "async"}
    start |= {"max_staleness": 1, "groups_per_batch": 1, "num_generations": 4, "process": process}
    spans = []
    for step in range(steps):
        spans += [
            {"kind": "take", "began": step, "ended": step + taken, "version": step},
            {"kind": "step", "began": step, "ended": step + 1, "version": step + 1},
            {
                "kind": "group",
                "outcome": outcome,
                "submitted": step - 1,
                "finished": step + taken - scoring,
                "scoring": step + taken - scoring,
            }
            | dict.fromkeys(("scored", "ended"), step + taken),
            {"kind": "log", "logged": {"step": step + 1, "loss": 0.1, **(logged or {})}},
        ]
    ends = [{"kind": "end", "time": 9.0, "error": error}] if end else []
    text = "\n".join(json.dumps(line) for line in [start, *spans, *lines, *ends])
    (folder / "timeline.jsonl").write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"end": False}, "killed after optimizer step 4"),
        ({"steps": 0, "end": False}, "still starting, or the process was killed before its first optimizer step"),
        ({"steps": 0}, "ended before its first optimizer step"),
        ({"error": "ValueError: 1000 rows"}, "ended after optimizer step 4 with an error. ValueError: 1000 rows"),
        (
            {"steps": 0, "error": "ValueError: no"},
            "ended before its first optimizer step with an error. ValueError: no",
        ),
        ({"taken": 0.9}, "Generation-bound: the trainer waited 90% of the time"),
        ({"taken": 0.9, "scoring": 0.9}, "Score more groups at a time (reward_workers)"),
        ({"logged": {"loss": None}}, "lower learning_rate"),
        ({"logged": {"frac_reward_zero_std": 1.0}}, "all rewards are equal"),
        ({"logged": {"a3po/engine/restarts": 2}}, "the engine died 2 times"),
        ({"logged": {"a3po/reward/timeouts": 3}}, "3 groups had a reward that took longer"),
        ({"outcome": "rejected: too dull"}, "4 of 4 attempts were rejected: too dull"),
        ({"outcome": "failed: out of memory"}, "4 of 4 attempts were failed: out of memory"),
    ],
)
def test_a_timeline_says_what_went_wrong(tmp_path, capsys, facts, words):
    code, printed = doctor(capsys, timeline(tmp_path, **facts))
    assert words in printed
    assert code == int("PROBLEM" in printed)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("steps", [0, 4])
def test_a_run_whose_process_is_there_has_not_ended(tmp_path, capsys, steps):
    code, printed = doctor(capsys, timeline(tmp_path, steps=steps, end=False, process=this_process()))
    when = "after optimizer step 4" if steps else "before its first optimizer step"
    assert f"The run has not ended: its process {os.getpid()} is still there, {when}." in printed
    assert code == 0 and "PROBLEM" not in printed and "killed" not in printed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_ended_is_not_said_to_be_there_though_its_process_may_be(tmp_path, capsys, ends):
    process = this_process() if ends else this_process() | {"started": 1}
    _, printed = doctor(capsys, timeline(tmp_path, end=ends, process=process))
    assert "still there" not in printed
    assert ("the process was killed after optimizer step 4: it is not there any more" in printed) is not ends


def test_rows_that_were_left_out_are_counted_once_with_the_last_one(tmp_path, capsys):
    rows = [(3, "with an overlong prompt"), (5, "with an unreadable image"), (5, "with an unreadable image")]
    lines = [
        {"kind": "left_out", "row": row, "dataset_row": row + 10, "reason": reason, "text": f"{row} is bad."}
        for row, reason in rows
    ]
    code, printed = doctor(capsys, timeline(tmp_path, *lines))
    words = "2 rows of the data were left out (1 with an overlong prompt, 1 with an unreadable image)"
    assert f"WARNING: {words}. The last one is row 15 of train_dataset: 5 is bad.\n" in printed and code == 0


def test_a_run_without_fault_has_no_finding(tmp_path, capsys):
    code, printed = doctor(capsys, timeline(tmp_path))
    assert code == 0 and printed.startswith("Balanced: ") and printed.endswith("\nNo problem was found.\n")
    assert printed.count("\n") == 2


# --- the forecast beside what was measured --------------------------------------------------------------------------

SIMULATED = Workload(Geometric(20.0, 60)), Rates(EngineSpeed([(1, 100.0), (64, 3000.0)]), 20_000.0)


def simulated(stale=None, changed=lambda group: group):
    """The lines of a run that took just what the forecast expects, with another logged staleness and other groups."""
    rules = Rules(groups_per_take=4, num_generations=4, max_staleness=2)
    lines = simulate(*SIMULATED, Split(), rules, takes=60).lines
    lines = [changed(line) if line["kind"] == "group" else line for line in lines]
    logged = {} if stale is None else {"a3po/staleness/mean": stale}
    return [*lines, {"kind": "log", "logged": logged}]


def staleness_of(lines):
    run = finished_run(lines)
    return forecast(run.work, run.rates, run.split, run.rules).mean_staleness


def test_a_run_that_goes_as_forecast_has_no_difference_to_explain():
    lines = simulated()
    said = beside_measured(simulated(staleness_of(lines)))
    assert "Measured: " in said and "steps stale" in said
    assert "differ" not in said and "because" not in said
    assert "steps stale" not in beside_measured(lines).split("Measured: ")[1]  # not logged


def test_an_engine_that_keeps_its_versions_explains_older_tokens():
    def keeps(group):
        return group | {"newest": group["submitted_version"]}

    stale = staleness_of(simulated()) + 0.5
    assert "sampled each group to its end from the weights of its submission" in beside_measured(
        simulated(stale, keeps)
    )

    def goes_on(group):
        return group | {"newest": group["submitted_version"] + 1}

    for said in (beside_measured(simulated(stale, goes_on)), beside_measured(simulated(stale - 1.0, keeps))):
        assert "does not say why the staleness differs" in said


@pytest.mark.long
def test_stragglers_that_length_does_not_explain_explain_a_longer_step(tmp_path):
    limits.make_run("straggler", tmp_path)
    said = beside_measured(read_timeline(tmp_path))
    assert "knows no stragglers that are slow for another reason" in said and "does not say" not in said


def test_checkpoints_are_whole_or_named(tmp_path, capsys):
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        checkpoint.begin(folder)
        checkpoint.write_json(folder / checkpoint.STATE, {})
        if step == 1:
            checkpoint.complete(folder, step)
    code, printed = doctor(capsys, tmp_path)
    assert code == 1 and "checkpoint-1 is whole" in printed and "checkpoint-2 has no a3po_complete.json" in printed
    assert doctor(capsys, tmp_path / "checkpoint-1")[0] == 0


def test_the_error_in_what_a_run_printed_comes_with_its_advice(tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_text(
        "Traceback\ntrl_a3po.errors.StallError: Nothing has happened for 600.0 s (stall_timeout): x.\n  y\n"
    )
    code, printed = doctor(capsys, log)
    assert code == 1 and "PROBLEM: StallError: Nothing has happened" in printed
    assert "raise the timeout that the message names" in printed


def test_nothing_to_examine_is_said(tmp_path, capsys):
    assert doctor(capsys, tmp_path / "none")[0] == 2
    assert doctor(capsys, tmp_path / "none.yaml")[0] == 2


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path)])
    assert ended.value.code == 2 and f"{tmp_path} holds neither a run" in capsys.readouterr().err
