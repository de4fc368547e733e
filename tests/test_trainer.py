"""The trainer's hooks: alignment of versions, the objective's gradient, bounds, failures and endings."""

import itertools
import math
import threading
import time
from types import SimpleNamespace

import pandas
import pytest
import torch
from peft import LoraConfig

from tests.runs import TakeRecorder, logged
from tests.tiny import VOCAB, tiny_prompts
from trl_a3po import A3POConfig, A3POTrainer
from trl_a3po.errors import EngineError, RewardError
from trl_a3po.objectives import asympo_loss, decoupled_loss, proximal_logps, spo_loss
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rollout.queue import GenerationQueue
from trl_a3po.session.evaluation import evaluation_prompts
from trl_a3po.testing import StubEngine, scripted_completion

GENERATIONS, LENGTH = 4, 8

COMPLETE = scripted_completion(VOCAB, LENGTH)


def reward(completion_ids, **kwargs):
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def build(model_path, tmp_path, trainer_class=A3POTrainer, reward_funcs=reward, engine=None, **settings):
    options = {
        name: settings.pop(name) for name in ("peft_config", "train_dataset", "eval_dataset") if name in settings
    }
    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": GENERATIONS,
        "max_completion_length": LENGTH,
        "max_steps": 8,
        "max_staleness": 4,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "delivery_check_steps": 0,
        **settings,
    }
    args = A3POConfig(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        report_to="none",
        log_all_metrics=True,
        save_strategy="no",
        disable_tqdm=True,
        engine=engine or StubEngine(COMPLETE),
        model_init_kwargs={"dtype": "float32"},
        **settings,
    )
    return trainer_class(model_path, reward_funcs, args=args, **{"train_dataset": tiny_prompts(), **options})


# --- versions -----------------------------------------------------------------------------------------------------


class Recorder(TakeRecorder):
    """Keeps what the loss is given, and the rollouts that each take handed out."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_batches = []

    def _take(self):
        rows = super()._take()
        version, groups = self.takes.pop()
        self.takes.append((version, [rollout for group in groups for rollout in group.rollouts]))
        return rows

    def _compute_loss(self, model, inputs):
        self.micro_batches.append((len(self.takes) - 1, self.state.global_step, dict(inputs)))
        return super()._compute_loss(model, inputs)


class MixedVersions(Recorder):
    """Each token has a version of its own, as if weights had been published while its completion was sampled."""

    def _take(self):
        rows = super()._take()
        version, rollouts = self.takes[-1]
        for number, rollout in enumerate(rollouts):
            rollout.versions[:] = [max(0, version - (number + i) % 3) for i in range(len(rollout.versions))]
        return rows


@pytest.fixture
def default_dtype(request):
    """Torch's default dtype, as a script sets it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.bfloat16], indirect=True)
@pytest.mark.usefixtures("default_dtype")
def test_versions_and_log_probs_stay_with_their_tokens_through_shuffle_and_split(model_path, tmp_path):
    trainer = build(model_path, tmp_path, MixedVersions, steps_per_generation=4, max_steps=6)
    trainer.train()
    checked = 0
    for take, _, inputs in trainer.micro_batches:
        version, rollouts = trainer.takes[take]
        by_tokens = {tuple(rollout.token_ids): rollout for rollout in rollouts}
        for row in range(len(inputs["completion_ids"])):
            length = int(inputs["completion_mask"][row].sum())
            rollout = by_tokens[tuple(inputs["completion_ids"][row, :length].tolist())]
            assert inputs["behavior_versions"][row].tolist() == rollout.versions + [-1] * (
                inputs["behavior_versions"].shape[1] - length
            )
            assert inputs["staleness"][row, :length].tolist() == [version - v for v in rollout.versions]
            torch.testing.assert_close(
                inputs["sampling_per_token_logps"][row, :length],
                torch.tensor(rollout.logps, dtype=torch.float32),
                rtol=0,
                atol=1e-6,
            )
            checked += 1
    assert checked == 6 * 2 * 4  # optimizer steps x micro-steps x rows


def test_staleness_is_constant_while_a_batch_is_used_and_never_above_the_bound(model_path, tmp_path):
    trainer = build(model_path, tmp_path, Recorder, num_iterations=2, max_staleness=4, max_steps=12)
    trainer.train()
    seen = set()
    for take, step, inputs in trainer.micro_batches:
        inside = inputs["completion_mask"].bool()
        staleness = inputs["staleness"][inside]
        assert staleness.min() >= 0 and staleness.max() <= 4
        assert (inputs["staleness"] + inputs["behavior_versions"])[inside].unique().item() == trainer.takes[take][0]
        assert step in (trainer.takes[take][0], trainer.takes[take][0] + 1)
        seen |= set(staleness.tolist())
    assert max(seen) >= 2  # the engine did run ahead


def test_prompts_come_in_the_order_of_grpo_trainer_over_epochs(model_path, tmp_path):
    trainer = build(model_path, tmp_path, max_steps=20)  # 40 groups of a dataset of 32
    trainer.train()
    sampler = trainer._get_train_sampler()
    per_epoch = [list(sampler), list(sampler)]
    batch = 2 * GENERATIONS  # rows of a generation batch, which TRL yields once per micro-step
    expected = [
        trainer.train_dataset[epoch[start]]["prompt"]
        for epoch in per_epoch
        for chunk in range(0, len(epoch), 2 * batch)
        for start in range(chunk, chunk + batch, GENERATIONS)
    ]
    requests = sorted(trainer.args.engine.requests, key=lambda request: request.noise_key)
    assert [trainer._tokenizer.decode(list(request.prompt_ids)) for request in requests] == expected[:40]


# --- the objective ------------------------------------------------------------------------------------------------


class GradientCheck(A3POTrainer):
    """Compares the gradient of each micro-batch with that of a reference formula."""

    reference = None

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kept = inputs["completion_ids"].shape[1]
        lt, _, _ = super()._get_per_token_logps_and_entropies(model, ids, attention, kept)
        expected = torch.autograd.grad(type(self).reference(self, lt, inputs), parameters)
        self.compared = getattr(self, "compared", 0) + 1
        self.stalest = max(getattr(self, "stalest", 0), int(inputs["staleness"].max()))
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-6)
        return loss


def reduce(trainer, per_token, inputs):
    mask = inputs["completion_mask"]
    match trainer.args.loss_type:
        case "grpo":
            loss = ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
        case "bnpo":
            loss = (per_token * mask).sum() / mask.sum()
        case "dr_grpo":
            loss = (per_token * mask).sum() / (len(mask) * LENGTH)
        case "luspo":
            loss = (per_token * mask).sum(-1).mean()
        case "dapo":
            accumulation = trainer.args.gradient_accumulation_steps / trainer.args.steps_per_generation
            return (per_token * mask).sum() / (inputs["num_items_in_batch"] * accumulation)
    return loss / trainer.args.gradient_accumulation_steps


def decoupled_reference(trainer, lt, inputs):
    args, lb, mask = trainer.args, inputs["sampling_per_token_logps"], inputs["completion_mask"]
    lp = proximal_logps(lb, lt, inputs["staleness"], args.proximal_method, args.fresh_proximal)
    per_token, _ = decoupled_loss(
        lt, lb, lp, inputs["advantages"], mask, weight_cap=args.behavior_weight_cap,
        weight_mode=args.behavior_weight_mode, weight_level=args.importance_sampling_level,
    )  # fmt: skip
    return reduce(trainer, per_token, inputs)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dapo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"proximal_method": "linear"},
        {"proximal_method": "behavior"},
        {"proximal_method": "reuse"},
        {"fresh_proximal": "policy"},
        {"behavior_weight_mode": "mask", "behavior_weight_cap": 1.05},
        {"behavior_weight_mode": "truncate", "behavior_weight_cap": 1.05},
        {"behavior_weight_mode": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)], ids=["full", "lora"])
def test_the_trainers_gradient_is_that_of_the_closed_form(model_path, tmp_path, settings, lora):
    class Check(GradientCheck):
        reference = decoupled_reference

    peft_config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
    trainer = build(model_path, tmp_path, Check, peft_config=peft_config, max_steps=7, learning_rate=0.2, **settings)
    trainer.train()
    assert trainer.compared == 14 and trainer.stalest >= 2


@pytest.mark.parametrize("objective, loss", [("asympo", asympo_loss), ("spo", spo_loss)])
def test_the_gradient_of_the_balanced_objectives_is_that_of_their_closed_forms(model_path, tmp_path, objective, loss):
    class Check(GradientCheck):
        @staticmethod
        def reference(trainer, lt, inputs):
            value, _ = loss(lt, inputs["advantages"], inputs["completion_mask"])
            return value / trainer.args.gradient_accumulation_steps

    trainer = build(
        model_path, tmp_path, Check, objective=objective, loss_type="grpo", scale_rewards="none", max_steps=6
    )
    trainer.train()
    assert trainer.compared == 12 and trainer.stalest >= 2


def test_the_scale_of_both_signs_and_a_binding_floor_are_logged(model_path, tmp_path):
    settings = {"objective": "asympo", "loss_type": "grpo", "scale_rewards": "none", "max_steps": 2}
    trainer = build(model_path, tmp_path, asympo_min_scale=100.0, **settings)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "a3po/floor" in entry]
    assert len(entries) == 2 and all(entry["a3po/floor"] == 1 for entry in entries)
    assert all(entry["a3po/scale/positive"] > 0 and entry["a3po/scale/negative"] > 0 for entry in entries)


def rival_weight(objective, lt, lb, mask):
    rho = (lt - lb).detach().exp()
    if objective == "aipo":
        return rho.clamp(max=1.1)
    if objective == "masked_is":
        return torch.where((rho < 0.9) | (rho > 1.1), 0, rho)
    squares = sorted((rho.log().square()[mask]).tolist())
    while squares and sum(squares) / len(squares) > 1e-3:
        squares.pop()
    return torch.where(rho.log().square() > (squares[-1] if squares else -1), 0, rho)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "aipo", "aipo_cap": 1.1},
        {"objective": "m2po", "m2po_threshold": 1e-3},
        {"objective": "masked_is", "masked_is_lower": 0.9, "masked_is_upper": 1.1, "proximal_method": "reuse"},
    ],
    ids=lambda settings: settings["objective"],
)
def test_the_gradient_of_the_baselines_is_that_of_their_equations(model_path, tmp_path, settings):
    class Check(GradientCheck):
        @staticmethod
        def reference(trainer, lt, inputs):
            mask = inputs["completion_mask"].bool()
            weight = rival_weight(settings["objective"], lt, inputs["sampling_per_token_logps"], mask)
            per_token = -weight * inputs["advantages"].unsqueeze(1) * lt
            rows = (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)
            return rows.mean() / trainer.args.gradient_accumulation_steps

    trainer = build(model_path, tmp_path, Check, loss_type="grpo", max_steps=6, learning_rate=0.2, **settings)
    trainer.train()
    assert trainer.compared == 12 and trainer.stalest >= 2


@pytest.mark.parametrize("method, extra", [("loglinear", 0), ("reuse", 0), ("recompute", 6 * 8)])
def test_no_forward_but_trls_own_except_for_recompute(model_path, tmp_path, method, extra):
    trainer = build(model_path, tmp_path, proximal_method=method, max_steps=6, packed_forward="off")
    rows = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trainer.train()
    assert sum(rows) == 6 * 8 + extra  # 6 batches of 8 rows


def test_statistics_are_logged_whole_and_by_staleness(model_path, tmp_path):
    trainer = build(model_path, tmp_path)
    trainer.train()
    logged = {key for entry in trainer.state.log_history for key in entry}
    names = {"w/mean", "r/max", "rho/min", "ess", "clip/low", "clip/high", "w/capped", "interpolation_weight/mean"}
    names |= {"staleness/mean", "staleness/max", "d0/ess", "d2/w/mean", "d2/clip/high", "time/wait", "time/publish"}
    assert {f"a3po/{name}" for name in names} <= logged
    assert all(math.isfinite(v) for e in trainer.state.log_history for k, v in e.items() if k.startswith("a3po/"))


def test_the_completions_table_has_versions_staleness_and_weight(model_path, tmp_path):
    trainer = build(model_path, tmp_path, Recorder, log_completions=True, learning_rate=0.5, max_steps=5)
    trainer.train()
    table = pandas.read_parquet(tmp_path / "run" / "completions" / "completions_00005.parquet")
    version, rollouts = trainer.takes[-1]
    assert table["versions"].tolist() == [f"{min(r.versions)}-{max(r.versions)}" for r in rollouts]
    assert table["staleness"].tolist() == [version - r.versions[0] for r in rollouts]
    expected = {}
    for _, _, inputs in trainer.micro_batches[-2:]:
        lb, mask = inputs["sampling_per_token_logps"], inputs["completion_mask"]
        for row in range(len(mask)):
            expected[tuple(inputs["completion_ids"][row, : mask[row].sum()].tolist())] = (lb[row], mask[row])
    weights = dict(zip([tuple(r.token_ids) for r in rollouts], table["w"], strict=True))
    assert len(weights) == len(rollouts) == 8 and not table["w"].isna().any()
    assert any(abs(w - 1) > 1e-3 for w in weights.values()) and expected.keys() == weights.keys()


def test_the_completions_table_has_no_weight_for_what_was_not_trained(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, log_completions=True, num_iterations=2, max_steps=2, eval_dataset=tiny_prompts(1),
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=GENERATIONS,
    )  # fmt: skip
    trainer.train()
    trained, evaluated = 2 * GENERATIONS, GENERATIONS
    weights = list(trainer._logs["extra"]["w"])  # of the last rows, as many as a batch has
    assert len(weights) == trained and weights[-2 * evaluated :] == [None] * 2 * evaluated
    after_one = pandas.read_parquet(tmp_path / "run" / "completions" / "completions_00001.parquet")["w"]
    assert after_one[:-evaluated].notna().all() and after_one[-evaluated:].isna().all()


def test_drift_within_a_batch_is_logged_apart_from_its_staleness(model_path, tmp_path):
    trainer = build(model_path, tmp_path, num_iterations=3, max_staleness=3, max_steps=9)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "a3po/drift" in entry]
    assert [entry["a3po/drift"] for entry in steps] == [0, 1, 2] * 3
    assert [entry["a3po/staleness/max"] for entry in steps] == [0, 0, 0, 3, 3, 3, 3, 3, 3]


def test_the_share_of_time_that_either_side_waits_is_logged(model_path, tmp_path, monkeypatch):
    ten_seconds_a_batch = SimpleNamespace(perf_counter=itertools.count(0.0, 10.0).__next__)
    monkeypatch.setattr("trl_a3po.report.take_metrics.time", ten_seconds_a_batch)

    def slow(completion_ids, **kwargs):
        time.sleep(0.2)
        return reward(completion_ids)

    trainer = build(model_path, tmp_path, reward_funcs=slow, max_staleness=1, max_steps=5)
    trainer.train()
    waited = logged(trainer, "a3po/time/wait")
    assert len(waited) == 5 and waited[0] > 0.2
    assert logged(trainer, "a3po/time/idle_share") == pytest.approx([seconds / 10 for seconds in waited[1:]], rel=1e-3)
    assert all(seconds >= 0 for seconds in logged(trainer, "a3po/time/blocked"))


# --- rewards ------------------------------------------------------------------------------------------------------


def test_advantages_belong_to_the_rewards_of_their_rows(model_path, tmp_path):
    trainer = build(model_path, tmp_path, Recorder, scale_rewards="none", max_steps=4)
    trainer.train()
    for take, _, inputs in trainer.micro_batches:
        rollouts = trainer.takes[take][1]
        values = torch.tensor(reward([r.token_ids for r in rollouts])).view(-1, GENERATIONS)
        advantages = (values - values.mean(1, keepdim=True)).flatten().tolist()
        expected = {tuple(r.token_ids): a for r, a in zip(rollouts, advantages, strict=True)}
        for row, advantage in enumerate(inputs["advantages"].tolist()):
            tokens = inputs["completion_ids"][row, : int(inputs["completion_mask"][row].sum())].tolist()
            assert advantage == pytest.approx(expected[tuple(tokens)], abs=1e-5)


def test_each_group_is_scored_once_and_logs_are_replayed(model_path, tmp_path):
    calls = []

    def logging_reward(completion_ids, log_extra, log_metric, trainer_state, **kwargs):
        calls.append(len(completion_ids))
        log_extra("length", [len(ids) for ids in completion_ids])
        log_metric("calls", len(calls))
        return [float(len(ids)) for ids in completion_ids]

    trainer = build(
        model_path, tmp_path, reward_funcs=[logging_reward, reward], max_steps=3, reward_weights=[1.0, 0.5]
    )
    trainer.train()
    assert set(calls) == {GENERATIONS} and len(calls) == 6
    lengths = [len(completion.split()) for completion in trainer._logs["completion"]]
    assert list(trainer._logs["extra"]["length"]) == lengths
    assert list(trainer._logs["rewards"]["logging_reward"]) == lengths
    assert max(trainer._logs["rewards"]["reward"]) <= 1
    steps = [entry for entry in trainer.state.log_history if "calls" in entry]
    assert [entry["calls"] for entry in steps] == [1.5, 3.5, 5.5]
    assert "rewards/logging_reward/mean" in steps[0] and "rewards/reward/mean" in steps[0]


def test_a_batch_in_which_every_reward_is_none_ends_the_run_and_names_the_functions(model_path, tmp_path):
    def silent(completions, **kwargs):
        return [None] * len(completions)

    def silent_too(completions, **kwargs):
        return [None] * len(completions)

    with pytest.raises(RewardError, match="'silent', 'silent_too' returned None for all completions"):
        build(model_path, tmp_path, reward_funcs=[silent, silent_too]).train()


def test_a_close_that_was_interrupted_is_finished_by_the_next_one(model_path, tmp_path, monkeypatch):
    engine = StubEngine(COMPLETE)
    trainer = build(model_path, tmp_path, engine=engine)
    real_close, calls = engine.close, []

    def interrupted_once():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real_close()

    monkeypatch.setattr(engine, "close", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not engine.closed and trainer._session is not None
    session = trainer._session
    trainer.close()
    assert engine.closed and trainer._session is None and len(calls) == 2
    assert session.queue.status().producer == "the queue is closed"
    session.close()  # and any further one does nothing new


def test_what_an_interrupted_queue_leaves_open_is_closed_all_the_same(model_path, tmp_path, monkeypatch):
    engine, closed = StubEngine(COMPLETE), []
    trainer = build(model_path, tmp_path, engine=engine)
    real_close = RewardScorer.close
    monkeypatch.setattr(RewardScorer, "close", lambda scorer: closed.append(scorer) or real_close(scorer))

    def interrupted(queue):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GenerationQueue, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert engine.closed and len(closed) == 1
    trainer.close()
    assert trainer._session is None and not [t for t in threading.enumerate() if t.name.startswith("a3po rollout")]


def test_a_failing_reward_ends_the_run_with_its_cause_and_closes_the_engine(model_path, tmp_path):
    def broken(completions, **kwargs):
        raise KeyError("gold")

    engine = StubEngine(COMPLETE)
    trainer = build(model_path, tmp_path, reward_funcs=broken, engine=engine)
    with pytest.raises(RewardError, match="'broken' raised KeyError") as error:
        trainer.train()
    assert isinstance(error.value.__cause__, KeyError)
    assert engine.closed


# --- evaluation ---------------------------------------------------------------------------------------------------


class EvaluationRecorder(A3POTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.evaluated = []

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            self.evaluated.append((self.state.global_step, batch))
        return batch


def test_evaluation_samples_from_the_current_policy_while_training_rollouts_wait(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, EvaluationRecorder, eval_dataset=tiny_prompts(6), eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=4, num_generations_eval=2, max_steps=6,
    )  # fmt: skip
    trainer.train()
    assert [step for step, _ in trainer.evaluated] == [2, 2, 2, 4, 4, 4, 6, 6, 6]
    for step, batch in trainer.evaluated:
        inside = batch["completion_mask"].bool()
        assert set(batch["behavior_versions"][inside].tolist()) == {step}
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 3 and all(math.isfinite(entry["eval_loss"]) for entry in evaluations)
    trained = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(trained) == 6  # and nothing of the training was lost
    assert sorted(r.noise_key for r in trainer.args.engine.requests if r.noise_key < 1000) == list(range(12))


def test_an_evaluations_publish_puts_off_no_publish_of_the_training(model_path, tmp_path):
    engine = StubEngine(COMPLETE)
    trainer = build(
        model_path, tmp_path, engine=engine, eval_dataset=tiny_prompts(4), eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=4, max_steps=8, weight_sync_steps=3, max_staleness=4,
    )  # fmt: skip
    trainer.train()
    assert engine.published == [0, 2, 3, 4, 6, 8]  # the training's are 0, 3 and 6


def test_evaluation_batches_must_hold_whole_groups(model_path, tmp_path):
    trainer = build(model_path, tmp_path, eval_dataset=tiny_prompts(6), per_device_eval_batch_size=3)
    with pytest.raises(ValueError, match="num_generations_eval=4: set per_device_eval_batch_size"):
        evaluation_prompts(trainer, [{"prompt": "w1"}] * 3)


def test_evaluation_without_training_is_trls(model_path, tmp_path):
    trainer = build(model_path, tmp_path, eval_dataset=tiny_prompts(4), per_device_eval_batch_size=4)
    assert math.isfinite(trainer.evaluate()["eval_reward"])


# --- beginnings and ends ------------------------------------------------------------------------------------------


def test_training_moves_the_parameters_and_every_group_generated_is_trained(model_path, tmp_path):
    engine = StubEngine(COMPLETE)
    trainer = build(model_path, tmp_path, engine=engine, max_steps=5)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(b, p) for b, p in zip(before, trainer.model.parameters(), strict=True))
    assert len(engine.requests) == 5 * 2  # nothing is generated that the run cannot train on
    assert engine.published == [0, 1, 2, 3, 4]
    assert engine.closed


def test_weights_are_published_every_so_many_steps(model_path, tmp_path):
    engine = StubEngine(COMPLETE)
    build(model_path, tmp_path, engine=engine, max_steps=8, weight_sync_steps=3).train()
    assert engine.published == [0, 3, 6]


def test_the_sync_schedule_trains_on_fresh_tokens_only(model_path, tmp_path):
    trainer = build(model_path, tmp_path, Recorder, schedule="sync", max_steps=4)
    trainer.train()
    for _, _, inputs in trainer.micro_batches:
        assert inputs["staleness"][inputs["completion_mask"].bool()].max() == 0


def test_a_second_train_starts_again(model_path, tmp_path):
    engine = StubEngine(COMPLETE)
    trainer = build(model_path, tmp_path, engine=engine, max_steps=3)
    trainer.train()
    trainer.train()
    assert engine.published == [0, 1, 2, 0, 1, 2]


def test_an_engine_that_fails_ends_the_run_with_its_words(model_path, tmp_path):
    class Failing(StubEngine):
        def wait(self, timeout):
            if self.version >= 2:
                raise EngineError("The worker died three times: out of memory.")
            return super().wait(timeout)

    engine = Failing(COMPLETE)
    with pytest.raises(EngineError, match="out of memory"):
        build(model_path, tmp_path, engine=engine).train()
    assert engine.closed


def test_a_stamp_above_the_trainers_version_is_refused(model_path, tmp_path):
    class FromTheFuture(StubEngine):
        def _rollouts(self, request):
            rollouts = super()._rollouts(request)
            rollouts[0].versions[-1] = self.version + 9
            return rollouts

    with pytest.raises(Exception, match="version"):
        build(model_path, tmp_path, engine=FromTheFuture(COMPLETE)).train()


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_grpo_config_is_refused(model_path, tmp_path):
    from trl import GRPOConfig

    with pytest.raises(TypeError, match="pass an A3POConfig"):
        A3POTrainer(model_path, reward, args=GRPOConfig(str(tmp_path), use_cpu=True), train_dataset=tiny_prompts())


def test_a_dataset_without_prompts_is_refused(model_path, tmp_path):
    with pytest.raises(ValueError, match="columns question, target, but no 'prompt'"):
        build(model_path, tmp_path, train_dataset=tiny_prompts().rename_column("prompt", "question"))


def test_a_dataset_smaller_than_a_batch_is_refused(model_path, tmp_path):
    with pytest.raises(ValueError, match="8 rows, fewer than the 32 prompts"):
        build(model_path, tmp_path, train_dataset=tiny_prompts(8), per_device_train_batch_size=64)


def test_unknown_generation_kwargs_are_refused(model_path, tmp_path):
    with pytest.raises(ValueError, match="num_beams"):
        build(model_path, tmp_path, generation_kwargs={"num_beams": 4}).train()
