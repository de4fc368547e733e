"""Every way to name a policy, its adapter, its rewards and its data trains what it says."""

import copy
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.runs import (
    COMPLETE,
    GENERATIONS,
    ScriptedGRPOTrainer,
    assert_same_gradients,
    assert_trains_as_grpo,
    build,
    logged,
    reward,
    train_recorded,
)
from tests.tiny import save_tiny_model, tiny_config, tiny_prompts, tiny_tokenizer
from trl_a3po import A3POTrainer
from trl_a3po.testing import StubEngine, completion_logps

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("same_rows_in_each_micro_batch")]


class SpecKeepingEngine(StubEngine):
    def start(self, spec, sampling, update):
        self.spec, self.names = spec, set(update.tensors)
        super().start(spec, sampling, update)


# --- the policy ---------------------------------------------------------------------------------------------------


def loaded(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_a_model_object_trains_as_its_path(model_path, tmp_path):
    assert_trains_as_grpo(lambda: loaded(model_path), tmp_path)
    by_path = train_recorded(build(model_path, tmp_path))
    by_object = train_recorded(build(loaded(model_path), tmp_path))
    assert_same_gradients(by_object, by_path)


def test_a_model_built_from_a_configuration_needs_only_its_tokenizer(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    assert_trains_as_grpo(lambda: copy.deepcopy(model), tmp_path, processing_class=tiny_tokenizer())


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_train_as_grpo(tmp_path, tied):
    path = save_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    assert_trains_as_grpo(path, tmp_path, beta=0.04)


def test_a_model_in_bfloat16_is_served_in_bfloat16(model_path, tmp_path):
    engine = SpecKeepingEngine(COMPLETE)
    build(model_path, tmp_path, engine=engine, model_init_kwargs={"dtype": "bfloat16"}, max_steps=1).train()
    assert engine.spec.dtype == torch.bfloat16
    assert {p.dtype for p in engine._replica.parameters()} == {torch.bfloat16}


LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


def test_a_peft_model_with_a_reference_trains_as_grpo_and_publishes_only_what_is_trained(model_path, tmp_path):
    def adapted():
        torch.manual_seed(5)
        return get_peft_model(loaded(model_path), LoraConfig(**LORA))

    engine = SpecKeepingEngine(COMPLETE)
    mine, _ = assert_trains_as_grpo(adapted, tmp_path, beta=0.1, ours={"engine": engine})
    model = mine.accelerator.unwrap_model(mine.model)
    assert set(model.peft_config) == {"default", "ref"} and model.active_adapters == ["default"]
    assert not any(".ref." in name for name in engine.names)
    weights = dict(model.named_parameters())
    trained = next(name for name in weights if ".default." in name)
    assert not torch.equal(weights[trained], weights[trained.replace(".default.", ".ref.")])
    assert max(logged(mine, "kl")) > 1e-4


ADAPTERS = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "trained norms": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "bias": {"bias": "lora_only", "target_modules": ["q_proj"]},
    "LoRA bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "one rank a layer": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
}


@pytest.mark.parametrize(
    "kind, sync",
    [(kind, "adapter") for kind in ADAPTERS] + [(kind, "merged") for kind in ("DoRA", "modules_to_save", "LoRA bias")],
)
def test_adapters_train_as_in_grpo_and_the_engine_follows_them(tmp_path, kind, sync):
    path = save_tiny_model(tmp_path / "model", attention_bias=True)
    engine = StubEngine(COMPLETE)
    mine, _ = assert_trains_as_grpo(
        path, tmp_path, peft_config=LoraConfig(**(LORA | ADAPTERS[kind])), ours={"engine": engine, "lora_sync": sync}
    )
    model = mine.accelerator.unwrap_model(mine.model).eval()
    prompt, completion = [5, 9, 11], [4, 8, 15, 16]
    before = completion_logps(engine._replica, prompt, completion, 1.0)  # of version 3, one step behind
    now = completion_logps(model, prompt, completion, 1.0)
    assert 1e-4 < (before - now).abs().max() < 5
    assert max(abs(value - 1) for value in logged(mine, "a3po/rho/max")) < 1e-3


def test_a_lora_bias_without_a_bias_to_merge_it_into_is_refused(model_path, tmp_path):
    peft_config = LoraConfig(**LORA, lora_bias=True)
    with pytest.raises(ValueError, match=r"lora_bias=True trains a bias there.*Set lora_sync='adapter'"):
        build(model_path, tmp_path, peft_config=peft_config, lora_sync="merged")
    build(model_path, tmp_path, peft_config=peft_config, lora_sync="adapter")


# --- classes of the user's own ------------------------------------------------------------------------------------

NOTEBOOK = """
import pathlib
import sys

from transformers import LlamaForCausalLM

sys.path.insert(0, {root!r})
from tests.runs import build
from tests.tiny import tiny_config, tiny_tokenizer


class Halved(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, inputs, output: output * 0.5)


model = Halved(tiny_config())
trainer = build(model, pathlib.Path({folder!r}), processing_class=tiny_tokenizer(), engine="transformers",
                engine_slots=4, engine_threads=1, max_steps=2)
trainer.train()
gaps = [abs(entry["a3po/d0/rho/max"] - 1) for entry in trainer.state.log_history if "a3po/d0/rho/max" in entry]
print("GAP", max(gaps), len(gaps), Halved.__module__)
"""


@pytest.mark.long
def test_a_class_defined_in_a_notebook_or_script_reaches_the_engines_process(tmp_path):
    """From standard input, as a notebook's kernel: `__main__` has no file. The hook halves the last hidden state, so
    an engine that knew only Llama would be off by far."""
    program = NOTEBOOK.format(root=str(Path(__file__).parents[1]), folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    _, gap, steps, module = run.stdout[run.stdout.index("GAP") :].split()[:4]
    assert float(gap) < 1e-3 and steps == "2" and module == "__main__"


MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM


class OddConfig(LlamaConfig):
    model_type = "odd"


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, inputs, output: output * 0.5)
"""


@pytest.fixture
def remote_code_path(tmp_path, monkeypatch):
    """A folder whose model class is in a file of its own, as on the hub."""
    folder = tmp_path / "odd"
    save_tiny_model(folder)
    (folder / "modeling_odd.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "odd", "architectures": ["OddForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_odd.OddConfig",
        "AutoModelForCausalLM": "modeling_odd.OddForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("engine", ["stub", "transformers"])
def test_a_model_with_code_of_its_own_is_trained_and_served(remote_code_path, tmp_path, engine):
    settings = {"engine_slots": 4, "engine_threads": 1, "engine": "transformers"} if engine == "transformers" else {}
    kwargs = {"dtype": "float32", "trust_remote_code": True}
    trainer = build(
        remote_code_path, tmp_path, model_init_kwargs=kwargs, trust_remote_code=True, max_steps=2,
        processing_class=tiny_tokenizer(), **settings,
    )  # fmt: skip
    assert type(trainer.model).__module__.startswith("transformers_modules.")
    trainer.train()
    assert max(abs(value - 1) for value in logged(trainer, "a3po/d0/rho/max")) < 1e-3
    assert len(logged(trainer, "loss")) == 2


def test_code_of_a_model_is_not_trusted_unasked(remote_code_path, tmp_path):
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        build(remote_code_path, tmp_path)


def test_a_tokenizer_of_the_users_own_writes_the_prompts(model_path, tmp_path):
    class Reversing(type(tiny_tokenizer())):
        def __call__(self, text=None, **kwargs):
            encoded = super().__call__(text=text, **kwargs)
            encoded["input_ids"] = [ids[::-1] for ids in encoded["input_ids"]]
            return encoded

    tokenizer = tiny_tokenizer()
    tokenizer.__class__ = Reversing
    engine = StubEngine(COMPLETE)
    _, theirs = assert_trains_as_grpo(model_path, tmp_path, ours={"engine": engine}, processing_class=tokenizer)
    plain = {tuple(tiny_tokenizer()(prompt)["input_ids"][::-1]) for prompt in tiny_prompts()["prompt"]}
    assert {request.prompt_ids for request in engine.requests} <= plain
    assert {tuple(ids) for ids in theirs.prompts_seen} == {request.prompt_ids for request in engine.requests}


# --- rewards ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward model")
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1), dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def length_reward(completion_ids, **kwargs):
    return [len(ids) / 8 for ids in completion_ids]


@pytest.mark.parametrize("as_path", [True, False], ids=["path", "object"])
def test_reward_models_score_beside_functions_on_the_main_thread(model_path, reward_model_path, tmp_path, as_path):
    threads, columns = set(), {}

    def reward_funcs():
        if as_path:
            return [length_reward, reward_model_path, reward]
        scorer = AutoModelForSequenceClassification.from_pretrained(reward_model_path, num_labels=1)
        scorer.register_forward_pre_hook(lambda *args: threads.add(threading.current_thread()))
        return [length_reward, scorer, reward]

    gradients = []
    for trainer_class in (ScriptedGRPOTrainer, A3POTrainer):
        trainer = build(
            model_path, tmp_path, trainer_class, reward_funcs=reward_funcs(), reward_weights=[0.3, 5.0, 1.0]
        )
        gradients.append(train_recorded(trainer))
        columns[trainer_class] = {name: list(values) for name, values in trainer._logs["rewards"].items()}
    assert_same_gradients(gradients[1], gradients[0])
    assert columns[A3POTrainer].keys() == columns[ScriptedGRPOTrainer].keys()
    for name, values in columns[ScriptedGRPOTrainer].items():
        assert columns[A3POTrainer][name] == pytest.approx(values, abs=1e-5)
        assert len({round(value, 5) for value in values}) > 1
    assert threads <= {threading.main_thread()}


def partly_none(completion_ids, **kwargs):
    return [None if sum(ids) % 3 == 0 else sum(ids) % 7 / 7 for ids in completion_ids]


def all_none(completion_ids, **kwargs):
    return [None] * len(completion_ids)


async def awaited(completion_ids, **kwargs):
    return [len(set(ids)) / 8 for ids in completion_ids]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize(
    "funcs",
    [
        [reward, length_reward],
        [reward, partly_none],
        [partly_none],
        [all_none, reward],
        [awaited, reward, length_reward],
    ],
    ids=lambda funcs: "+".join(func.__name__ for func in funcs),
)
def test_several_rewards_give_the_advantages_of_grpo(model_path, tmp_path, funcs, aggregation):
    advantages = []
    for trainer_class in (ScriptedGRPOTrainer, A3POTrainer):
        trainer = build(
            model_path, tmp_path, trainer_class, reward_funcs=list(funcs), max_steps=2,
            reward_weights=[1.0, 0.25, 2.0][: len(funcs)], multi_objective_aggregation=aggregation,
        )  # fmt: skip
        trainer.train()
        advantages.append(list(trainer._logs["advantages"]))
        assert any(abs(value) > 0.1 for value in advantages[-1])
        rewards = logged(trainer, "reward")
    assert advantages[1] == pytest.approx(advantages[0], abs=1e-4)
    assert len(rewards) == 2


def test_a_row_that_no_function_scores_has_no_advantage(model_path, tmp_path):
    def but_the_first(completion_ids, **kwargs):
        return [None, *(float(number) for number in range(1, len(completion_ids)))]

    trainer = build(model_path, tmp_path, reward_funcs=but_the_first)
    trainer.train()
    unscored = [advantage == 0.0 for advantage in trainer._logs["advantages"]]
    assert sum(unscored) >= len(unscored) // GENERATIONS and not all(unscored)


def test_logs_of_several_functions_come_in_row_order_as_in_grpo(model_path, tmp_path):
    def one(completion_ids, log_extra, log_metric, target, **kwargs):
        log_extra("length", [len(ids) for ids in completion_ids])
        log_metric("targets", sum(target))
        return [float(len(ids)) for ids in completion_ids]

    def two(completion_ids, log_extra, log_metric, **kwargs):
        log_extra("first", [ids[0] for ids in completion_ids])
        log_metric("rows", 1.0)
        return [float(ids[0]) for ids in completion_ids]

    tables = []
    for trainer_class in (ScriptedGRPOTrainer, A3POTrainer):
        trainer = build(model_path, tmp_path, trainer_class, reward_funcs=[one, two])
        trainer.train()
        tables.append({name: list(values) for name, values in trainer._logs["extra"].items()})
        assert logged(trainer, "rows") == [1.0] * 4
    theirs, mine = tables
    assert mine == theirs and set(mine) == {"length", "first"} and len(mine["length"]) == 2 * GENERATIONS


def test_the_trainers_state_is_a_snapshot_for_rewards(model_path, tmp_path):
    seen = []

    def meddling(completion_ids, trainer_state, **kwargs):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        trainer_state.global_step, trainer_state.max_steps = 10_000, 1
        trainer_state.log_history.clear()
        return length_reward(completion_ids)

    trainer = build(model_path, tmp_path, reward_funcs=meddling)
    trainer.train()
    assert trainer.state.global_step == 4 and trainer.state.max_steps == 4
    assert seen == [(step, 4) for step in range(4) for _ in range(2)]
    assert len(logged(trainer, "loss")) == 4
