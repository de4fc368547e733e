"""Two processes, and ZeRO and FSDP2 over two, train what one process trains on the same completions.

What differs is the order in which numbers are added: the rows of a step lie on other processes and in other
micro-batches, and ZeRO flattens gradients before it clips them. In fp32 that is a relative 1e-6 or so a step; three
steps of plain SGD keep it there, so weights must agree to 1e-5.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import runs
from tests.distributed.launch import launch
from tests.tiny import save_tiny_model
from tests.vision import FAMILIES
from trl_a3po.report.timeline import NAME

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SPREAD = ["ddp", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("zero2", "zero3", "fsdp2"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "tied", tie_word_embeddings=True)
    FAMILIES["qwen2_5_vl"].model().save_pretrained(folder / "images")
    done = launch("tests.distributed.runs", folder, "one", processes=1)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


@pytest.fixture(scope="module", params=SPREAD)
def spread(request, folder):
    if request.param.startswith("zero"):
        pytest.importorskip("deepspeed")
    done = launch("tests.distributed.runs", folder, request.param)
    assert done.returncode == 0, done.stdout[-6000:]
    return folder / request.param


def weights(folder):
    if folder.name == "images":  # ZeRO-3 has its weights saved under other names
        return FAMILIES["qwen2_5_vl"].model_class.from_pretrained(folder, dtype=torch.float32).state_dict()
    (path,) = folder.glob("*model.safetensors")
    saved = load_file(path)
    if folder.name == "tied":  # tied weights that FSDP2 has gathered are saved under both names
        saved.pop("lm_head.weight", None)
    return saved


def log(folder):
    return json.loads((folder / "log.json").read_text())


def logged(folder, name):
    return [entry[name] for entry in log(folder)["history"] if name in entry]


@pytest.mark.parametrize("name", list(runs.RUNS))
def test_the_weights_trained_are_those_of_one_process(folder, spread, name):
    expected, trained = weights(folder / "one" / name), weights(spread / name)
    assert trained.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(trained[key].float(), weight.float(), rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", list(runs.RUNS))
def test_what_is_logged_is_that_of_one_process(folder, spread, name):
    for key in ("reward", "a3po/w/mean", "a3po/rho/max", "a3po/staleness/mean", "a3po/staleness/max", "grad_norm"):
        assert logged(spread / name, key) == pytest.approx(logged(folder / "one" / name, key), rel=1e-3), key
    assert len(logged(spread / name, "a3po/staleness/mean")) == 3


@pytest.mark.parametrize("name", list(runs.RUNS))
def test_every_version_reaches_the_engine_once(folder, spread, name):
    assert log(spread / name)["published"] == log(folder / "one" / name)["published"]


def policies(folder):
    """What the timeline says of the policy of each run, of which there is one after the other."""
    lines = map(json.loads, (folder / NAME).read_text().splitlines())
    return [tuple(line["policy"].items()) for line in lines if line["kind"] == "start"]


def test_a_policy_is_as_large_as_in_one_process(folder, spread):
    one, several = policies(folder / "one"), policies(spread)
    assert several == one or (spread.name == "fsdp2" and len(several) > 3 and set(several) <= set(one))


def test_an_evaluation_scores_what_one_process_scores(folder, spread):
    expected = logged(folder / "one" / "evaluation", "eval_reward")
    assert expected and logged(spread / "evaluation", "eval_reward") == pytest.approx(expected, rel=1e-5)


def test_episodes_are_those_of_one_process(folder, spread):
    for name in ("a3po/episodes/turns", "tools/call_frequency", "rewards/Steps/mean", "completions/mean_length"):
        expected = logged(folder / "one" / "episodes", name)
        assert len(expected) == 3 and logged(spread / "episodes", name) == pytest.approx(expected, rel=1e-5), name


def test_the_anchors_compare_over_all_processes_as_in_one(folder, spread):
    """Sums, means and extremes of the tokens of every process, at a batch's first optimizer step and its later one."""
    names = {name for entry in log(folder / "one" / "compared")["history"] for name in entry if "/compare/" in name}
    assert {"a3po/compare/first/gap/max", "a3po/compare/first/d2/w/mean", "a3po/compare/later/r/min"} <= names
    for name in sorted(names):
        expected = logged(folder / "one" / "compared", name)
        # The smallest difference of two log-probs has their rounding, which is not relative to the difference.
        rounding = 1e-5 if name.endswith("gap/min") else 1e-6
        assert logged(spread / "compared", name) == pytest.approx(expected, rel=1e-3, abs=rounding), name
    assert max(logged(spread / "compared", "a3po/compare/first/d2/gap/mean")) > 1e-3


@pytest.mark.parametrize("name", ["full", "lora", "merged"])
def test_zero3_never_holds_more_whole_weights_than_a_bucket(spread, name):
    if spread.name != "zero3":
        pytest.skip("the other ways hold all weights in every process")
    # One bucket, and what one layer of a forward may have left behind.
    assert 0 < log(spread / name)["most_whole_bytes"] <= runs.BUCKET_BYTES


@pytest.mark.parametrize("name", ["full", "lora", "grpo-kl", "compared", "evaluation"])
def test_zero3_fetches_weights_ahead_whatever_runs_without_gradients_in_between(spread, name):
    """The self-check, the delivery check, the reference, the anchor at take, an evaluation: after none of them does
    DeepSpeed fetch each of the 21 weights by itself, forward and backward."""
    if spread.name != "zero3":
        pytest.skip("the other ways gather nothing")
    assert 0 < log(spread / name)["gathers"] <= 4


@pytest.mark.parametrize("name", [name for name in runs.RUNS if name not in ("images", "padded")])
def test_every_process_packs_its_rows_into_as_many_forwards_as_the_others(spread, name):
    """Completions have 1 to 8 tokens, so that the rows of two processes never weigh the same."""
    one, other = log(spread / name)["forwards"]
    assert one == other > 0
    assert min(logged(spread / name, "a3po/forward/token_ratio")) > 1.1


@pytest.mark.long
def test_a_configuration_of_the_recipes_launches_the_same_run(folder):
    pytest.importorskip("deepspeed")
    done = launch("tests.distributed.runs", folder, "launched", "lora", config="zero3")
    assert done.returncode == 0, done.stdout[-6000:]
    expected, trained = weights(folder / "one" / "lora"), weights(folder / "launched" / "lora")
    for key, weight in expected.items():
        torch.testing.assert_close(trained[key].float(), weight.float(), rtol=1e-5, atol=1e-5, msg=key)
