"""`trl-a3po plan`: what it prints for a finished run, for a recipe, for a number of GPUs, and for bad input."""

import json

import pytest
from transformers import AutoModelForCausalLM

from tests.planning.test_finished_run import RULES, lines_of
from tests.tiny import save_tiny_model, tiny_prompts
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.cli.diagnosis import diagnose
from trl_a3po.cli.main import main
from trl_a3po.cli.numbers import SECONDS, SEQUENCES, SPEED, TOKENS, NumberAction
from trl_a3po.cli.plan import make_parser
from trl_a3po.planning.earlier_run import forecast_from_earlier_run
from trl_a3po.planning.policy_size import PolicySize
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


SMALL = {"parameters": 1_000, "trained": 1_000, "dtype": "float32"}


def run_of(folder, policy):
    begin, *lines = lines_of()
    begin |= {} if policy is None else {"policy": policy}
    folder.mkdir()
    (folder / "timeline.jsonl").write_text("\n".join(json.dumps(line) for line in [begin, *lines]) + "\n")
    return folder


@pytest.mark.parametrize("other", [{"parameters": 2_000}, {"trained": 10}, {"dtype": "bfloat16"}], ids=str)
def test_runs_of_two_models_are_not_fitted_together(tmp_path, capsys, other):
    one, another = run_of(tmp_path / "one", SMALL), run_of(tmp_path / "another", SMALL | other)
    error = refused(capsys, "--run", one, "--run", another)
    first = f"--run {one} has 1,000 parameters, of which 1,000 are trained, in float32"
    assert "The runs train different models" in error and first in error and f"and --run {another} has" in error
    assert planned(capsys, "--run", another)["measured"] is not None


def test_runs_of_one_model_and_those_that_do_not_say_are_fitted_together(tmp_path, capsys):
    runs = [run_of(tmp_path / name, policy) for name, policy in (("a", SMALL), ("b", SMALL), ("c", None))]
    assert planned(capsys, *(part for run in runs for part in ("--run", run)))["forecasts"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "model")


def size_of(folder) -> dict:
    weights = list(AutoModelForCausalLM.from_pretrained(folder).parameters())
    numbers = sum(weight.numel() for weight in weights)
    return {"parameters": numbers, "trained": numbers, "dtype": "bfloat16"}  # --model does not say a dtype


def test_the_rates_of_a_run_are_not_those_of_another_model(model, tmp_path, capsys):
    one, another = run_of(tmp_path / "one", size_of(model)), run_of(tmp_path / "another", SMALL)
    assert planned(capsys, "--run", one, *SETTINGS, "--model", model)["forecasts"][0]["memory_gib"]
    error = refused(capsys, "--run", another, *SETTINGS, "--model", model)
    assert f"--model is {str(model)!r}, which has " in error and "whose policy has 1,000 parameters" in error
    speeds = ["--engine_speed", "8:400", "--training_speed", "900"]
    assert planned(capsys, "--run", another, *SETTINGS, "--model", model, *speeds)["forecasts"]


def test_the_rates_of_a_run_without_an_adapter_are_not_those_with_one(model, tmp_path, capsys):
    adapter = ["--use_peft", "true", "--lora_target_modules", "all-linear"]
    whole = run_of(tmp_path / "whole", size_of(model))
    capsys.readouterr()
    assert "whose policy has" in refused(capsys, "--run", whole, *SETTINGS, "--model", model, *adapter)


def test_the_memory_of_a_model_needs_settings(run, model, capsys):
    error = refused(capsys, "--run", run, "--model", model)
    assert f"--model is {str(model)!r}, but its memory depends on settings that --run does not hold" in error


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
        ([*SETTINGS, *RATES, "--lengths", "fixed:9", "--gpus", "1"], "1 GPUs cannot be shared out"),
        (["--gpus"], "--gpus: expected one argument"),
        (["--zero_stage", "4"], "--zero_stage: invalid choice: 4 (choose from 0, 1, 2, 3)"),
        (["outputs/run", "--gpus", "8"], "'outputs/run' is given alone: write --run RUN or --config RECIPE.yaml."),
        (["--run", "nowhere"], "nowhere holds no timeline.jsonl"),
        (["--config", "nowhere.yaml"], "there is no such file"),
        ([*SETTINGS, "--max_lateness", "3", *RATES, "--lengths", "fixed:9"], "there is no option '--max_lateness'"),
        ([*SETTINGS, *RATES, "--reward_second", "3"], "no option '--reward_second'; is it '--reward_seconds'?"),
        ([*SETTINGS, *RATES, "--max_stalenes", "3"], "no option '--max_stalenes'; is it '--max_staleness'?"),
        ([*SETTINGS, *RATES, "--lengths", "fixed:9", "--model", "/no/such/model"], "/no/such/model"),
        (["--gpus", "8", "--trainers", "3"], "--trainers is 3, but --gpus 8 asks for the best number of trainers"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config is given twice"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, arguments, sentence):
    assert sentence in refused(capsys, *arguments)


TIMES = ("reward_seconds", "micro_step_seconds", "optimizer_step_seconds", "publish_seconds")
NUMBERS = [action for action in make_parser()._actions if isinstance(action, NumberAction)]


def test_every_option_that_takes_a_number_has_limits():
    bounded = {action.dest for action in NUMBERS}
    others = {action.dest for action in make_parser()._actions if action.type in (int, float)} - {"zero_stage"}
    assert len(bounded) == 9 and not others


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e99", "many", "", "0", "0.5"])
@pytest.mark.parametrize("action", NUMBERS, ids=lambda action: action.dest)
def test_a_number_that_means_nothing_is_refused_by_its_option(capsys, action, value):
    option, numbers = action.option_strings[0], action._numbers
    if (value == "0" and numbers.least == 0) or (value == "0.5" and not numbers.whole):
        assert getattr(make_parser().parse_args([option, value]), action.dest) == float(value)
        return
    assert refused(capsys, option, value) == f"trl-a3po plan: {option} is {value!r}, but it must be {numbers}.\n"


@pytest.mark.parametrize("text", ["fast", "8", "8:0", "0:8", "8:-1", "8:inf", "nan:8", "8:9:10", ":", "8:x"])
def test_a_point_of_an_engine_that_means_nothing_is_refused(capsys, text):
    arguments = [*SETTINGS, "--lengths", "fixed:9", "--training_speed", "9", "--engine_speed", "4:100", text]
    assert f"--engine_speed has {text!r}, but a point is SEQUENCES:TOKENS_PER_SECOND" in refused(capsys, *arguments)


def test_two_speeds_of_an_engine_for_one_number_of_sequences_are_refused(capsys):
    arguments = [*SETTINGS, "--lengths", "fixed:9", "--training_speed", "9", "--engine_speed", "8:9", "8.0:10"]
    assert "--engine_speed has two points for 8 sequences" in refused(capsys, *arguments)


@pytest.mark.parametrize("slowest", [True, False])
def test_a_run_at_the_edges_of_all_numbers_can_be_planned(capsys, slowest):
    (slow, fast) = ("least", "most") if slowest else ("most", "least")
    rate, sequences = getattr(SPEED, slow), getattr(SEQUENCES, fast)
    rates = ["--training_speed", rate, "--engine_speed", f"{sequences:.0f}:{rate}"]
    times = [part for name in TIMES for part in (f"--{name}", getattr(SECONDS, fast))]
    lengths = ["--lengths", f"geometric:{getattr(TOKENS, fast):.0f}"]
    plan = planned(capsys, *SETTINGS, *rates, *times, *lengths)
    assert all(0 < made["step_seconds"] < float("inf") for made in plan["forecasts"])


@pytest.mark.parametrize(
    "text", ["long", "fixed", "fixed:", "fixed:0", "fixed:inf", "geometric:nan", "fixed:²", "x:9"]
)
def test_lengths_that_mean_nothing_are_refused(capsys, text):
    arguments = [*SETTINGS, *RATES, "--lengths", text]
    assert f"--lengths is {text!r}, but it must be fixed:N or geometric:N" in refused(capsys, *arguments)


def test_a_plan_forecasts_from_the_run_that_its_folder_holds(run, tmp_path):
    policy = PolicySize(**SMALL)
    for folder in (run, run_of(tmp_path / "same", SMALL)):
        line = forecast_from_earlier_run(folder, RULES, Split(slots=200), policy)
        assert "s per step" in line and "at the rates of the run in output_dir" in line
    of_another = run_of(tmp_path / "another", SMALL | {"parameters": 5_000})
    line = forecast_from_earlier_run(of_another, RULES, Split(slots=200), policy)
    assert line.startswith("none from the run in output_dir, which trained another model: 5,000 parameters")
    assert forecast_from_earlier_run(tmp_path, RULES, Split(), policy) is None
    (tmp_path / "timeline.jsonl").write_text(json.dumps(lines_of()[0]) + "\n")
    assert "which is too few for its rates" in forecast_from_earlier_run(tmp_path, Rules(8, 4, 2), Split(), policy)


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
