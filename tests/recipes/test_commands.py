"""Every command on top of a recipe names fields and files that exist, and fills whole groups and batches."""

import shlex
import subprocess

import pytest

from tests.recipes.headers import RECIPES, ROOT, UNAVAILABLE, commands, launcher_value, train_arguments
from trl_a3po.cli.train import make_parser

HEADERS = [(path.name, words) for path in RECIPES for words in commands(path.read_text())]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROSE = [
    words for page in PAGES for words in commands(page.read_text()) if (ROOT / train_arguments(words)[0]).is_file()
]


def parsed(words: list[str]):
    recipe, *options = train_arguments(words)
    options = [word for word in options if word != "--smoke"]
    if "--engine_device" in options or "engine_device" in (ROOT / recipe).read_text():
        options = [*without(options, "--engine_device"), "--engine_device", "cpu"]  # GPUs are not here
    try:
        return make_parser().parse_args_and_config(["--config", str(ROOT / recipe), *options])
    except ValueError as error:
        if UNAVAILABLE in str(error):
            pytest.skip(str(error))
        raise


def without(words: list[str], option: str) -> list[str]:
    if option not in words:
        return words
    start = words.index(option)
    end = next((i for i in range(start + 1, len(words)) if words[i].startswith("--")), len(words))
    return words[:start] + words[end:]


@pytest.mark.parametrize(("name", "words"), HEADERS, ids=[f"{n} {i}" for i, (n, _) in enumerate(HEADERS)])
def test_a_command_of_a_recipe_can_be_parsed_and_fills_its_batches(name, words):
    script_args, training_args, model_args = parsed(words)
    assert train_arguments(words)[0] == f"recipes/{name}"
    assert model_args.model_name_or_path and script_args.reward_funcs
    processes = launcher_value(words, "--num_processes", 1)
    assert processes % launcher_value(words, "--num_machines", 1) == 0
    rows = processes * training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps
    assert rows % training_args.num_generations == 0
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()


def test_commands_of_readme_and_docs_can_be_parsed():
    assert PROSE
    for words in PROSE:
        parsed(words)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_it_runs_on_one_gpu_on_several_and_on_two_nodes(path):
    header = path.read_text().split("\n\n")[0]
    launched = commands(header)
    plain = [words for words in launched if "launch" not in words]
    several = [words for words in launched if "launch" in words and "--num_machines" not in words]
    nodes = [words for words in launched if "--num_machines" in words]
    assert plain and several
    assert nodes or "vllm_elsewhere.yaml" in header


def test_the_paper_set_ups_keep_their_batch_at_every_number_of_gpus():
    for name, batch in (("gsm8k_qwen2.5_1.5b.yaml", 1024), ("dapo_math_qwen3_8b.yaml", 512)):
        for words in (words for found, words in HEADERS if found == name and "--smoke" not in words):
            _, args, _ = parsed(words)
            processes = launcher_value(words, "--num_processes", 1)
            assert processes * args.per_device_train_batch_size * args.gradient_accumulation_steps == batch, words


def test_the_slurm_script_starts_one_launcher_a_node_with_what_it_was_given(tmp_path):
    stubs = {
        "scontrol": "echo node-a; echo node-b",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "accelerate": 'printf "%s\\n" "$*"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "123",
    }
    script = str(ROOT / "recipes" / "slurm" / "train.sbatch")
    result = subprocess.run(
        ["bash", script, "recipes/periodic.yaml", "--output_dir", "a folder"],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    first, second = result.stdout.splitlines()
    assert "--num_processes 16 --machine_rank 0 --main_process_ip node-a --main_process_port 20123" in first
    assert "--machine_rank 1 --main_process_ip node-a" in second
    assert first.endswith("-m trl_a3po train recipes/periodic.yaml --output_dir a folder")
    assert shlex.split(first)[:2] == ["launch", "--config_file"]
