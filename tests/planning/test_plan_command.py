"""`trl-a3po plan`: what it prints for a finished run, for a recipe, for a number of GPUs, and for bad input."""

import json

import pytest

from tests.planning.test_finished_run import RULES, lines_of
from tests.tiny import save_tiny_model, tiny_prompts
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.cli.diagnosis import diagnose
from trl_a3po.cli.main import main
from trl_a3po.planning.earlier_run import forecast_from_earlier_run
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split

RATES = ["--engine_speed", "8:400", "64:1600", "--training_speed", "900", "--publish_seconds", "0.5"]
BATCH = ["--num_generations", "4", "--per_device_train_batch_size", "32", "--gradient_accumulation_steps", "1"]
SETTINGS = [*BATCH, "--max_completion_length", "100", "--use_cpu", "true", "--engine", "vllm"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    lines = [json.dumps(line) for line in lines_of()]
    (folder / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def planned(capsys, *arguments):
    capsys.readouterr()  # of a library that printed while it was imported
    main(["plan", "--json", *map(str, arguments)])
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(["plan", *map(str, arguments)])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


def test_a_finished_run_is_forecast_beside_what_was_measured(run, capsys):
    plan = planned(capsys, "--run", run)
    (made,) = plan["forecasts"]
    assert made["step_seconds"] == pytest.approx(plan["measured"]["step_seconds"], rel=0.1)
    main(["plan", "--run", str(run)])
    shown = capsys.readouterr().out
    assert "time of a step" in shown and "Measured:" in shown and made["verdict"]["sentence"][:20] in shown


def test_other_settings_are_forecast_at_the_rates_of_a_run(run, capsys):
    plan = planned(capsys, "--run", run, *SETTINGS, "--schedule", "sync")
    assert plan["measured"] is None
    assert set(plan["forecasts"][0]["staleness"]) == {"0"}
    assert plan["forecasts"][0]["step_seconds"] > planned(capsys, "--run", run)["forecasts"][0]["step_seconds"]


def test_what_a_run_with_one_size_of_micro_batches_does_not_tell_is_said(run, tmp_path, capsys):
    small = Rules(8, 4, 2, micro_steps_per_take=8, micro_steps_per_step=8)
    (tmp_path / "timeline.jsonl").write_text("\n".join(json.dumps(line) for line in lines_of(rules=small)) + "\n")
    batch = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8"]
    others = [*SETTINGS, *batch]
    unknown = planned(capsys, "--run", run, *others)["unknown"]
    assert "The runs have 1 of them per optimizer step, and this one has 8" in unknown and "Add a --run" in unknown
    assert planned(capsys, "--run", run, *SETTINGS)["unknown"] is None
    between = [*SETTINGS, "--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "2"]
    assert planned(capsys, "--run", run, *between)["unknown"] is not None
    assert planned(capsys, "--run", run, "--run", tmp_path, *between)["unknown"] is None
    assert planned(capsys, "--run", run, "--micro_step_seconds", "0.1", *others)["unknown"] is None


def test_settings_come_from_a_recipe_and_from_the_command_line(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_staleness: 3\nnum_generations: 4\nper_device_train_batch_size: 32\nuse_cpu: true\n")
    plan = planned(capsys, "--config", recipe, *RATES, "--lengths", "fixed:50", "--gradient_accumulation_steps", "1")
    assert max(map(int, plan["forecasts"][0]["staleness"])) <= 3
    assert plan["forecasts"][0]["tokens_per_second"] * plan["forecasts"][0]["step_seconds"] == pytest.approx(32 * 50)


def test_the_best_split_is_first_and_memory_is_beside_it(tmp_path, capsys):
    model = save_tiny_model(tmp_path / "model")
    arguments = ["--gpus", "4", "--model", model, *SETTINGS, *RATES, "--lengths", "geometric:40"]
    plan = planned(capsys, *arguments)
    steps = [made["step_seconds"] for made in plan["forecasts"]]
    assert steps == sorted(steps) and len(steps) > 1
    assert all(made["split"]["trainers"] + made["split"]["engines"] <= 4 for made in plan["forecasts"])
    assert plan["forecasts"][0]["memory_gib"]["a trainer"] > 0
    assert "No split fits into the memory" in refused(capsys, *arguments, "--gpu_memory", "0.00001")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*SETTINGS, *RATES], "The lengths of completions are not known: give --lengths"),
        ([*SETTINGS, "--lengths", "fixed:9"], "The speed of an engine is not known"),
        ([*SETTINGS, "--lengths", "fixed:9", "--engine_speed", "8:9"], "The speed of training is not known"),
        ([*SETTINGS, *RATES, "--lengths", "long"], "--lengths is 'long'"),
        ([*SETTINGS, *RATES[3:], "--lengths", "fixed:9", "--engine_speed", "fast"], "--engine_speed has 'fast'"),
        ([*SETTINGS, *RATES[3:], "--lengths", "fixed:9", "--engine_speed", "8:0"], "both numbers must be positive"),
        ([*SETTINGS, *RATES, "--lengths", "fixed:9", "--gpus", "1"], "1 GPUs cannot be shared out"),
        ([*SETTINGS, *RATES, "--lengths", "fixed:9", "--training_speed", "-1"], "it must be positive"),
        (["--run", "nowhere"], "nowhere holds no timeline.jsonl"),
        (["--config", "nowhere.yaml"], "there is no such file"),
        ([*SETTINGS, "--max_lateness", "3", *RATES, "--lengths", "fixed:9"], "there is no setting 'max_lateness'"),
        ([*SETTINGS, *RATES, "--lengths", "fixed:9", "--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, arguments, sentence):
    assert sentence in refused(capsys, *arguments)


def test_a_plan_forecasts_from_the_run_that_its_folder_holds(run, tmp_path):
    line = forecast_from_earlier_run(run, RULES, Split(slots=200))
    assert "s per step" in line and "at the rates of the run in output_dir" in line
    assert forecast_from_earlier_run(tmp_path, RULES, Split()) is None
    (tmp_path / "timeline.jsonl").write_text(json.dumps(lines_of()[0]) + "\n")
    assert "which is too few for its rates" in forecast_from_earlier_run(tmp_path, Rules(8, 4, 2), Split())


def test_the_doctor_says_the_forecast_of_a_run(run):
    (sentence,) = [finding for finding in diagnose(run) if finding.startswith("Forecast from the rates of the run")]
    assert "s per step" in sentence and "Measured:" in sentence


def test_a_dry_run_forecasts_from_the_run_before(run, tmp_path, capsys):
    args = A3POConfig(
        output_dir=str(run),
        dry_run=True,
        use_cpu=True,
        report_to="none",
        max_completion_length=32,
        model_init_kwargs={"dtype": "float32"},
    )
    model = save_tiny_model(tmp_path / "model")
    A3POTrainer(model, lambda **kwargs: [], args=args, train_dataset=tiny_prompts()).train()
    assert "forecast:" in capsys.readouterr().out
