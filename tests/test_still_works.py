"""What a TRL user relies on, feature by feature, each by its effect: where it changes the training, the oracle is
`GRPOTrainer` on the same completions."""

import _thread
import asyncio
import importlib.util
import json
import math
import shutil
import threading
import time
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GPTNeoXConfig, TrainerCallback

from tests.runs import (
    COMPLETE,
    EOS,
    GENERATIONS,
    ScriptedGRPOTrainer,
    assert_same_gradients,
    assert_trains_as_grpo,
    build,
    complete_or_stop,
    logged,
    train_recorded,
)
from tests.tiny import VOCAB, tiny_prompts, tiny_tokenizer
from tests.workers.processes import children_that_run
from trl_a3po import A3POTrainer
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.testing import StubEngine

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("same_rows_in_each_micro_batch")]


class SpecKeepingEngine(StubEngine):
    def start(self, spec, sampling, update):
        self.spec, self.sampling = spec, sampling
        self.names = set(update.tensors)
        super().start(spec, sampling, update)


# --- how the forward and backward run -----------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradient_checkpointing_computes_layers_again_and_changes_no_gradient(
    model_path, tmp_path, lora, use_reentrant
):
    peft_config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
    gradients, layer_forwards = [], []
    for checkpointing in (False, True):
        trainer = build(
            model_path, tmp_path, max_staleness=4, learning_rate=0.05, peft_config=peft_config,
            gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
        )  # fmt: skip
        layer = next(module for name, module in trainer.model.named_modules() if name.endswith("layers.0.mlp"))
        calls = []
        layer.register_forward_pre_hook(lambda module, inputs, calls=calls: calls.append(1))
        gradients.append(train_recorded(trainer))
        layer_forwards.append(len(calls))
    assert layer_forwards[1] - layer_forwards[0] == 8  # once more in each backward
    assert_same_gradients(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def test_bf16_autocasts_the_forward_and_the_engine_follows(model_path, tmp_path):
    directions = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = SpecKeepingEngine(COMPLETE)
        trainer = build(model_path, tmp_path, bf16=dtype == torch.bfloat16, engine=engine)
        computed = set()
        layer = trainer.model.model.layers[0].mlp
        layer.register_forward_hook(lambda module, inputs, output, seen=computed: seen.add(output.dtype))
        gradients = train_recorded(trainer)
        assert computed == {dtype} and engine.spec.dtype == dtype
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
        directions.append(torch.cat([gradient.flatten() for gradient in gradients[0].values()]))
    assert torch.cosine_similarity(*directions, dim=0) > 0.95


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.long), pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_compiled_model_trains_as_grpo_and_is_published_under_its_own_names(model_path, tmp_path, backend):
    engine = SpecKeepingEngine(COMPLETE)
    torch._dynamo.reset()
    mine, _ = assert_trains_as_grpo(
        model_path, tmp_path, ours={"engine": engine}, torch_compile=True, torch_compile_backend=backend, max_steps=2
    )
    assert isinstance(mine.model_wrapped, torch._dynamo.eval_frame.OptimizedModule)
    assert engine.names == set(dict(mine.model.named_parameters()))
    assert not any("_orig_mod" in name for name in engine.names)


def test_liger_is_refused_as_trl_refuses_it_when_it_is_not_installed(model_path, tmp_path):
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    engine = StubEngine(COMPLETE)
    with pytest.warns(FutureWarning, match="use_liger_kernel"):
        trainer = build(model_path, tmp_path, use_liger_kernel=True, engine=engine)
    with pytest.raises(ImportError, match="liger-kernel"):
        trainer.train()
    assert engine.published == []


# --- the loss and its reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"top_entropy_quantile": 0.3},
        {"entropy_coef": 0.1},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 10.0, "entropy_coef_delta": 0.05},
        {"mask_truncated_completions": True},
        {"mask_truncated_completions": True, "loss_type": "grpo", "beta": 0.04},
        {"off_policy_mask_threshold": 0.02, "num_iterations": 2},
        {"pad_to_multiple_of": 16},
        {"scale_rewards": "batch"},
        {"epsilon": 0.05, "epsilon_high": 0.4, "num_iterations": 2},
        {"temperature": 0.7},
        {"dataloader_num_workers": 1},
        {"max_steps": -1, "num_train_epochs": 2, "train_dataset": tiny_prompts(5), "dataloader_drop_last": True},
        {"max_steps": -1, "num_train_epochs": 2, "train_dataset": tiny_prompts(7), "steps_per_generation": 3},
        {"max_steps": -1, "num_train_epochs": 1.5, "train_dataset": tiny_prompts(12)},
        {"cast_lm_head_to_fp32": True},
        {"logging_steps": 3, "logging_first_step": True},
    ],
    ids=str,
)
def test_settings_of_the_loss_train_as_grpo(model_path, tmp_path, settings):
    mine, theirs = assert_trains_as_grpo(model_path, tmp_path, stops=True, **settings)
    for name in ("loss", "entropy_coef", "policy_loss", "kl", "entropy", "completions/clipped_ratio"):
        assert logged(mine, name) == pytest.approx(logged(theirs, name), abs=1e-4), name


def test_masked_truncated_completions_contribute_nothing_whatever_their_versions(model_path, tmp_path):
    """Staleness above 1, where versions decide: without the truncated rows' gradient, nothing of them is left."""
    gradients = []
    for truncated in (COMPLETE, lambda ids, n: COMPLETE(ids, n) if n % 2 else [5] * 8):

        def complete(prompt_ids, rollout, truncated=truncated):
            return complete_or_stop(prompt_ids, rollout) if rollout % 2 else truncated(prompt_ids, rollout)

        trainer = build(
            model_path, tmp_path, engine=StubEngine(complete), mask_truncated_completions=True, max_staleness=4,
            loss_type="grpo", learning_rate=0.05, reward_funcs=lambda completion_ids, **kwargs: [0.0, 1.0, 0.5, 0.2],
        )  # fmt: skip
        gradients.append(train_recorded(trainer))
        assert max(logged(trainer, "a3po/staleness/max")) >= 2
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    assert_same_gradients(*gradients)


def test_a_batch_of_truncated_completions_only_trains_nothing(model_path, tmp_path):
    trainer = build(model_path, tmp_path, mask_truncated_completions=True, max_staleness=4)
    gradients = train_recorded(trainer)  # no completion of this engine ends with the stop token
    assert all(gradient.abs().max() == 0 for step in gradients for gradient in step.values())
    assert len(logged(trainer, "loss")) == 4


def test_the_off_policy_mask_drops_bad_completions_far_from_their_sampler(model_path, tmp_path):
    """DeepSeek-V3.2: drop a row when its advantage is negative and the mean of lb - lt exceeds the threshold."""

    class Checking(A3POTrainer):
        dropped = kept = 0

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            mask, width = inputs["completion_mask"], inputs["completion_ids"].shape[1]
            lt, _, _ = super()._get_per_token_logps_and_entropies(model, ids, attention, width)
            distance = ((inputs["sampling_per_token_logps"] - lt.detach()) * mask).sum(1) / mask.sum(1)
            drop = (distance > self.args.off_policy_mask_threshold) & (inputs["advantages"] < 0)
            self.dropped, self.kept = self.dropped + int(drop.sum()), self.kept + int((~drop).sum())
            without = {**inputs, "advantages": inputs["advantages"].masked_fill(drop, 0.0)}
            self.args.off_policy_mask_threshold, self.off_policy_mask_threshold = None, None
            expected = super()._compute_loss(model, without)
            self.args.off_policy_mask_threshold = self.off_policy_mask_threshold = 0.05
            parameters = list(model.parameters())
            for found, wanted in zip(
                torch.autograd.grad(loss, parameters, retain_graph=True),
                torch.autograd.grad(expected, parameters),
                strict=True,
            ):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
            return loss

    trainer = build(
        model_path, tmp_path, Checking, off_policy_mask_threshold=0.05, max_staleness=4, max_steps=6,
        learning_rate=0.1, gradient_checkpointing=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.dropped > 0 and trainer.kept > 0


def test_sync_ref_model_moves_the_reference_as_in_grpo(model_path, tmp_path):
    mine, theirs = assert_trains_as_grpo(
        model_path, tmp_path, beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.6, ref_model_sync_steps=2
    )
    started = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    expected = theirs.ref_model.state_dict()
    for name, tensor in mine.ref_model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
    assert any((started[name] - tensor).abs().max() > 1e-3 for name, tensor in expected.items())
    assert max(logged(mine, "kl")) > 1e-4


@pytest.mark.parametrize("disable", [True, False])
def test_dropout_is_the_trainers_alone(tmp_path, disable):
    config = GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout=0.5, bos_token_id=None, eos_token_id=EOS,
    )  # fmt: skip
    model, engine = AutoModelForCausalLM.from_config(config), StubEngine(COMPLETE)
    trainer = build(model, tmp_path, engine=engine, disable_dropout=disable, processing_class=tiny_tokenizer())
    trainer.train()
    assert not any(module.training for module in engine._replica.modules())
    ratios = [abs(value - 1) for name in ("a3po/rho/max", "a3po/rho/min") for value in logged(trainer, name)]
    assert max(ratios) < 1e-4 if disable else max(ratios) > 1e-2


# --- prompts, completions and rewards -----------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if style is defined %}{{ style }} {% endif %}{% if add_generation_prompt %}w60{% endif %}"
)


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def conversations(rows: int = 32):
    return tiny_prompts(rows).map(lambda row: {"prompt": [{"role": "w59", "content": row["prompt"]}]})


@pytest.mark.parametrize("kwargs", [None, {"style": "w58 w57"}], ids=str)
def test_conversations_are_templated_and_rewarded_as_in_grpo(model_path, tmp_path, kwargs):
    rewarded = []

    def messages_reward(prompts, completions, completion_ids, **kwargs):
        rewarded.append((prompts, completions))
        assert all(prompt[-1]["role"] == "w59" for prompt in prompts)
        return [len(set(completion[0]["content"].split())) / 8 for completion in completions]

    engine = StubEngine(COMPLETE)
    settings = {
        "train_dataset": conversations(), "processing_class": chat_tokenizer(), "chat_template_kwargs": kwargs,
        "reward_funcs": messages_reward,
    }  # fmt: skip
    _, theirs = assert_trains_as_grpo(model_path, tmp_path, ours={"engine": engine}, **settings)
    assert {message["role"] for _, completions in rewarded for (message,) in completions} == {"assistant"}
    by_row = {
        json.dumps(prompt): completion
        for prompts, cs in rewarded[:4]
        for prompt, completion in zip(prompts, cs, strict=True)
    }
    for prompts, completions in rewarded[4:]:  # ours, one call per group
        assert by_row[json.dumps(prompts[-1])] == completions[-1]
    requests = sorted(engine.requests, key=lambda request: request.noise_key)
    assert [list(request.prompt_ids) for request in requests] == theirs.prompts_seen[::GENERATIONS]
    words = chat_tokenizer().decode(list(requests[0].prompt_ids)).split()
    assert words[-1] == "w60" and words[-3:-1] == ["w58", "w57"] if kwargs else words[0] == "w59"


def test_generation_kwargs_reach_the_engine(model_path, tmp_path):
    engine = SpecKeepingEngine(COMPLETE)
    kwargs = {"min_new_tokens": 3, "suppress_tokens": [7, 8], "eos_token_id": [1, 9]}
    build(model_path, tmp_path, engine=engine, generation_kwargs=kwargs, max_steps=1).train()
    sampling = engine.sampling
    assert (sampling.min_new_tokens, sampling.suppress_token_ids) == (3, (7, 8))
    assert sampling.stop_token_ids == (1, 9)


def test_sampling_settings_reach_the_engine(model_path, tmp_path):
    engine = SpecKeepingEngine(COMPLETE)
    build(
        model_path, tmp_path, engine=engine, max_steps=1, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01,
        repetition_penalty=1.1, seed=9,
    ).train()  # fmt: skip
    sampling = engine.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 5, 0.01)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_new_tokens) == (1.1, 9, 8)
    assert (sampling.stop_token_ids, sampling.pad_token_id) == ((EOS,), 0)


@pytest.mark.parametrize("shuffle_dataset", [False, True])
@pytest.mark.parametrize("shuffled", [False, True], ids=["plain", "shuffled by the user"])
def test_a_stream_is_read_in_the_order_of_grpo_over_epochs(model_path, tmp_path, shuffle_dataset, shuffled):
    def stream():
        dataset = IterableDataset.from_generator(lambda: iter(tiny_prompts(5)))  # the last row is left out
        return dataset.shuffle(seed=5) if shuffled else dataset

    engine = StubEngine(COMPLETE)
    settings = {"shuffle_dataset": shuffle_dataset, "max_steps": 6}
    theirs = build(model_path, tmp_path, ScriptedGRPOTrainer, train_dataset=stream(), **settings)
    theirs.train()
    mine = build(model_path, tmp_path, train_dataset=stream(), engine=engine, **settings)
    mine.train()
    requests = sorted(engine.requests, key=lambda request: request.noise_key)
    assert [list(request.prompt_ids) for request in requests] == theirs.prompts_seen[::GENERATIONS]
    assert len(requests) == 12 and mine.state.global_step == 6


def test_a_stream_whose_end_may_fall_inside_an_optimizer_step_is_refused(model_path, tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(tiny_prompts(3)))
    with pytest.raises(ValueError, match="set steps_per_generation to a multiple of gradient_accumulation_steps=2"):
        build(model_path, tmp_path, train_dataset=stream, steps_per_generation=1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("remove", [False, True])
def test_columns_reach_the_reward_functions_unless_they_are_removed(model_path, tmp_path, remove, stream):
    seen = {}

    def column_reward(completion_ids, **kwargs):
        seen.setdefault(trainer_class, set()).update(kwargs)
        return [sum(ids) % 11 / 10 for ids in completion_ids]

    dataset = tiny_prompts().to_iterable_dataset() if stream else tiny_prompts()
    for trainer_class in (ScriptedGRPOTrainer, A3POTrainer):
        build(
            model_path, tmp_path, trainer_class, reward_funcs=column_reward, train_dataset=dataset,
            remove_unused_columns=remove, max_steps=1,
        ).train()  # fmt: skip
    assert seen[A3POTrainer] == seen[ScriptedGRPOTrainer]
    assert ("target" in seen[A3POTrainer]) != remove


# --- saving, sharing, choosing ------------------------------------------------------------------------------------


class FakeHub:
    """Stands in for the hub's client: keeps which files a push would have uploaded, and the card among them."""

    def __init__(self):
        self.created, self.pushes = [], []

    def create_repo(self, name, **kwargs):
        self.created.append(name)
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, commit_message, ignore_patterns=(), path_in_repo="", **kwargs):
        folder = Path(folder_path)
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        files -= {name for name in files for pattern in ignore_patterns or () if fnmatch(name, pattern)}
        card = (folder / "README.md").read_text() if "README.md" in files else None
        self.pushes.append(SimpleNamespace(message=commit_message, files=files, card=card, path=path_in_repo))
        future = Future()
        future.set_result(None)
        future.is_done = future.done
        return future


@pytest.fixture
def hub(monkeypatch):
    hub = FakeHub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    return hub


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_push_holds_the_model_and_a_card_that_names_the_method(model_path, tmp_path, hub, lora):
    peft_config = LoraConfig(r=4, target_modules="all-linear") if lora else None
    trainer = build(
        model_path, tmp_path, peft_config=peft_config, push_to_hub=True, hub_model_id="me/tiny", hub_token="secret",
        save_strategy="steps", save_steps=2, hub_strategy="checkpoint",
    )  # fmt: skip
    trainer.train()
    trainer.push_to_hub(dataset_name="tiny-prompts")
    assert hub.created == ["me/tiny"]
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert [(push.message, push.path) for push in hub.pushes] == [
        ("Training in progress, step 2", ""),
        ("Training in progress, step 2, checkpoint", "last-checkpoint"),
        ("Training in progress, step 4", ""),
        ("Training in progress, step 4, checkpoint", "last-checkpoint"),
        ("End of training", ""),
    ]
    for push in hub.pushes:
        assert {weights, "tokenizer.json"} <= push.files
        assert push.path or not any(name.startswith("checkpoint-") for name in push.files)
    assert any(name.startswith("a3po") for name in hub.pushes[1].files)  # what resuming needs
    card = hub.pushes[-1].card
    assert "trained with A3PO" in card and "https://huggingface.co/papers/2512.06547" in card
    assert "Cite A3PO as" in card and "eprint        = {2512.06547}" in card
    assert "None" not in card and 'model="me/tiny"' in card and "fine-tuned from local weights" in card
    assert {"- trl", "- grpo", "- a3po"} <= set(card.splitlines())


def test_a_push_sends_neither_data_of_the_run_nor_a_secret(model_path, tmp_path, hub):
    trainer = build(
        model_path, tmp_path, push_to_hub=True, hub_model_id="me/tiny", hub_token="hf_a_secret", log_completions=True,
        save_strategy="steps", save_steps=2, max_steps=2,
    )  # fmt: skip
    folder = Path(trainer.args.output_dir)
    for name in ("vllm/server/vllm-server.log", "timeline-1.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a prompt")
    trainer.train()
    trainer.push_to_hub()
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"timeline.jsonl", "completions/completions_00001.parquet"} <= written
    sent = set().union(*(push.files for push in hub.pushes))
    assert "model.safetensors" in sent and "training_args.bin" in sent
    kinds = ("timeline", "completions", "a3po", ".a3po", "vllm")
    assert [name for name in sent if name.startswith(kinds) or name.endswith(".log")] == []
    assert [path for path in folder.rglob("*") if path.is_file() and b"hf_a_secret" in path.read_bytes()] == []
    assert trainer.args.hub_token == "hf_a_secret"


def test_the_code_of_a_model_runs_only_if_it_is_trusted(model_path, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise RuntimeError('it ran')")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        build(str(folder), tmp_path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(RuntimeError, match="it ran"):
        build(str(folder), tmp_path, trust_remote_code=True)


def test_a_card_names_the_base_model_and_the_folder_of_a_run_that_is_on_no_hub(model_path, tmp_path):
    trainer = build(model_path, tmp_path)
    trainer.model.config._name_or_path = "someone/base"
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "A3POTrainer" / "README.md").read_text()
    assert "fine-tuned version of [someone/base](https://huggingface.co/someone/base)" in card
    assert f'model="{trainer.args.output_dir}"' in card and "None" not in card


def test_save_total_limit_keeps_the_newest_checkpoints(model_path, tmp_path):
    build(model_path, tmp_path, save_strategy="steps", save_steps=1, save_total_limit=2).train()
    left = {path.name for path in (tmp_path / "A3POTrainer").glob("checkpoint-*")}
    assert left == {"checkpoint-3", "checkpoint-4"}


def test_the_best_model_is_loaded_at_the_end_and_outlives_the_limit(model_path, tmp_path):
    """The reward of an evaluation is scripted: highest at step 2."""
    evaluation_rewards = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3}

    def scripted_reward(completion_ids, trainer_state, **kwargs):
        return [evaluation_rewards.get(trainer_state.global_step, 0.0) + i % 2 for i in range(len(completion_ids))]

    weights = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            weights[state.global_step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    trainer = build(
        model_path, tmp_path, reward_funcs=scripted_reward, callbacks=[Keep()], eval_dataset=tiny_prompts(4),
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, save_strategy="steps", save_steps=1,
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="eval_reward",
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "eval_reward") == pytest.approx([0.6, 1.4, 0.7, 0.8])
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, weights[2][name])
    left = {path.name for path in (tmp_path / "A3POTrainer").glob("checkpoint-*")}
    assert left == {"checkpoint-2"}


@pytest.mark.parametrize("size, stream", [(4, False), (2, True)])
def test_evaluation_gives_the_numbers_of_grpo(model_path, tmp_path, size, stream):
    dataset = tiny_prompts(6).to_iterable_dataset() if stream else tiny_prompts(6)
    mine, theirs = assert_trains_as_grpo(
        model_path, tmp_path, eval_dataset=dataset, eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=4, num_generations_eval=size, eval_on_start=False,
    )  # fmt: skip
    for name in ("eval_reward", "eval_loss", "eval_completions/mean_length", "eval_rewards/reward/std"):
        assert logged(mine, name) == pytest.approx(logged(theirs, name), abs=1e-4), name
        assert len(logged(mine, name)) == 2


def test_evaluation_at_the_start_and_by_name(model_path, tmp_path):
    evaluations = {"short": tiny_prompts(4), "long": tiny_prompts(8)}
    trainer = build(
        model_path, tmp_path, eval_dataset=evaluations, eval_strategy="steps", eval_steps=4, eval_on_start=True,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    for name in ("eval_short_loss", "eval_long_loss"):
        entries = [entry for entry in trainer.state.log_history if name in entry]
        assert [entry["step"] for entry in entries] == [0, 4]
        assert all(math.isfinite(entry[name]) and math.isfinite(entry["eval_reward"]) for entry in entries)


# --- callbacks ----------------------------------------------------------------------------------------------------


class LowersTheLearningRate(TrainerCallback):
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 0.3 / (1 + state.global_step)


class Evaluates(TrainerCallback):
    trainer = None

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.evaluate()

    def on_substep_end(self, args, state, control, **kwargs):
        self.trainer.evaluate()


class ReadsTheLog(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(("a3po/staleness/mean" in logs, len(state.log_history)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_callbacks_may_evaluate_read_and_steer_in_any_order(model_path, tmp_path, order):
    theirs = build(model_path, tmp_path, ScriptedGRPOTrainer, callbacks=[LowersTheLearningRate()])
    expected = train_recorded(theirs)
    evaluates, reads = Evaluates(), ReadsTheLog()
    callbacks = [LowersTheLearningRate(), evaluates, reads]
    engine = StubEngine(COMPLETE)
    evaluates.trainer = mine = build(
        model_path, tmp_path, callbacks=[callbacks[i] for i in order], engine=engine, eval_dataset=tiny_prompts(4),
        per_device_eval_batch_size=4,
    )  # fmt: skip
    assert_same_gradients(train_recorded(mine), expected)
    assert engine.published[-4:] == [0, 1, 2, 3]
    assert len(logged(mine, "eval_reward")) == 8
    assert sum(ours for ours, _ in reads.seen) == 4


def test_a_callback_that_stops_the_training_ends_the_run_and_the_engine(model_path, tmp_path, background):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    engine = StubEngine(COMPLETE)
    trainer = build(model_path, tmp_path, callbacks=[Stop()], engine=engine, max_staleness=4)
    assert trainer.train().global_step == 2
    assert engine.closed and background() == []


# --- again --------------------------------------------------------------------------------------------------------


@pytest.fixture
def background():
    """What a test has left running of this package, in this process and beside it. The thread of the reward functions
    lives as long as the trainer."""
    threads, children = set(threading.enumerate()), children_that_run("trl_a3po").keys()
    return lambda: [
        *(thread.name for thread in set(threading.enumerate()) - threads if is_of_ours(thread.name)),
        *(command for pid, command in children_that_run("trl_a3po").items() if pid not in children),
    ]


def is_of_ours(thread: str) -> bool:
    return thread.startswith("a3po") and thread != "a3po rewards"


class Interrupts(TrainerCallback):
    """Ctrl-C during the first training, at one of its moments."""

    def __init__(self, moment: str):
        self.due = True
        setattr(self, moment, self.interrupt)

    def interrupt(self, args, state, control, **kwargs):
        if self.due and state.global_step == 1:
            self.due = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["on_substep_end", "on_pre_optimizer_step", "on_log"])
def test_after_ctrl_c_nothing_is_left_and_training_starts_again(model_path, tmp_path, moment, background):
    engine = StubEngine(COMPLETE)
    trainer = build(model_path, tmp_path, callbacks=[Interrupts(moment)], engine=engine, num_iterations=2)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert engine.closed and background() == []
    trainer.model.load_state_dict(before)
    again = train_recorded(trainer)
    assert trainer.state.global_step == 4 and background() == []
    assert_same_gradients(again, train_recorded(build(model_path, tmp_path, num_iterations=2)))


def test_ctrl_c_while_waiting_for_the_engine_ends_the_wait(model_path, tmp_path, background):
    class NeverFinishes(StubEngine):
        stuck = True

        def wait(self, timeout):
            if self.stuck and self.version == 1:
                if self.due:
                    self.due = False
                    _thread.interrupt_main()
                time.sleep(timeout)
                return []
            return super().wait(timeout)

    engine = NeverFinishes(COMPLETE)
    engine.due = True
    trainer = build(model_path, tmp_path, engine=engine)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert engine.closed and background() == []
    engine.stuck = False
    assert trainer.train().global_step == 4


def test_ctrl_c_while_a_reward_function_is_at_work_begins_no_other_one(model_path, tmp_path, background, monkeypatch):
    judged, ended, interrupt = [], threading.Event(), RewardScorer.interrupt
    monkeypatch.setattr(RewardScorer, "interrupt", lambda scorer: (interrupt(scorer), ended.set()))

    def slow(completion_ids, **kwargs):
        _thread.interrupt_main()
        ended.wait(20)
        return [0.0] * len(completion_ids)

    async def judge(completion_ids, **kwargs):
        judged.append(1)
        await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        build(model_path, tmp_path, reward_funcs=[slow, judge]).train()
    assert judged == [] and background() == []


@pytest.mark.long
def test_ctrl_c_with_the_engines_process_and_again(model_path, tmp_path, background):
    """With the engine's own process: a second run in the same trainer begins with the weights of that moment."""
    trainer = build(
        model_path, tmp_path, engine="transformers", engine_slots=4, engine_threads=1, max_staleness=2,
        callbacks=[Interrupts("on_step_end")],
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert background() == []
    trainer.train()
    assert trainer.state.global_step == 4 and background() == []
    assert all(abs(math.log(value)) < 1e-3 for value in logged(trainer, "a3po/d0/rho/max")[:1])


def test_an_optimizer_of_the_users_own_trains_as_in_grpo(model_path, tmp_path):
    gradients = []
    for trainer_class in (ScriptedGRPOTrainer, A3POTrainer):
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.5)
        trainer = build(model, tmp_path, trainer_class, optimizers=(optimizer, None))
        gradients.append(train_recorded(trainer))
        assert torch.equal(model.model.norm.weight, torch.ones(32))
    assert_same_gradients(gradients[1], gradients[0])


def test_a_second_training_goes_on_with_the_trained_weights(model_path, tmp_path, background):
    settings = {"lr_scheduler_type": "constant", "max_steps": 2}
    theirs = build(model_path, tmp_path, ScriptedGRPOTrainer, **settings)
    mine = build(model_path, tmp_path, **settings)
    for _ in range(2):
        expected, found = train_recorded(theirs), train_recorded(mine)
        assert_same_gradients(found, expected)
    assert mine.state.global_step == 2 and background() == []
