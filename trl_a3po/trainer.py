"""`A3POTrainer`: TRL's `GRPOTrainer` fed by an engine that runs ahead of training.

Thin hooks around `super()`, in the order a batch meets them:

- `_prepare_inputs`: at the first micro-step of a generation batch, publish the weights, then take the batch, or, with
  `schedule="periodic"`, at each micro-step, take its groups;
- `_generate_single_turn` and `_calculate_rewards`: hand TRL the completions and rewards that are already there;
- `_generate_and_score_completions`: add each token's version and staleness to TRL's batch;
- `_get_per_token_logps_and_entropies` inside `_compute_loss`: from TRL's only forward pass, give TRL's loss the
  objective's anchor as `old_per_token_logps` and its weight on the advantages.

Guarantees: rewards, advantages, losses, normalisers, KL, entropy terms and logging stay TRL's; no second forward of
the policy except for `proximal_method="recompute"`; no maths and no threads here.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, TrainOutput, rotate_checkpoints
from trl import GRPOTrainer

from trl_a3po._compat import check_trl_hooks
from trl_a3po.checks.arguments import (
    argument_names,
    check_arguments,
    check_on_group,
    check_processing_class,
    check_reward_functions,
)
from trl_a3po.checks.completions import check_completions, check_some_reward, has_reward
from trl_a3po.checks.data import check_columns, check_dataset
from trl_a3po.checks.policy import check_policy, check_sharding, check_trained_before
from trl_a3po.config import A3POConfig
from trl_a3po.config.check_schedule import check_periodic
from trl_a3po.distributed.rank_shares import balanced_rows, rank_share
from trl_a3po.distributed.rank_watch import RankWatch
from trl_a3po.distributed.shared_folder import check_shared
from trl_a3po.distributed.team import Team
from trl_a3po.forward.training import TrainingForward
from trl_a3po.models.unwrap import base_model
from trl_a3po.objectives import token_staleness
from trl_a3po.objectives.choose import chosen_anchor
from trl_a3po.protocol.records import Group
from trl_a3po.publish.quantised import keep_trained_dtypes, prevent_repacking
from trl_a3po.report.completions_table import RowWeights, completion_columns
from trl_a3po.report.loss_metrics import LossMetrics
from trl_a3po.report.model_card import complete_model_card
from trl_a3po.report.run_timeline import TimelineCallback
from trl_a3po.report.take_metrics import TakeMetrics, add_seconds
from trl_a3po.report.trainer_plan import trainer_plan
from trl_a3po.rollout.batch_rows import Row, behavior_versions, replay_logs, replayed_rewards, rollouts_of
from trl_a3po.rollout.group_filter import OnGroup
from trl_a3po.session import Session
from trl_a3po.session.build_engine import engine_dtype, engine_slots, sampling_settings
from trl_a3po.session.build_scorer import reward_functions
from trl_a3po.session.resuming import RunState, begin_run, choose_checkpoint, load_run, warn_of_earlier_runs
from trl_a3po.session.saving import named_on_error, rotation_held, save_run, written_whole
from trl_a3po.session.trained_policy import trained_policy, zero_stage
from trl_a3po.step_normalizer import STEP_NORMALIZED_LOSS_TYPES, StepNormalizer

check_trl_hooks(GRPOTrainer)


class A3POTrainer(GRPOTrainer):
    """
    Trainer for asynchronous RL with staleness-aware policy optimization (A-3PO, arXiv 2512.06547).

    The arguments are those of [`~trl.GRPOTrainer`], with `args` an [`A3POConfig`]. Generation starts with
    [`~A3POTrainer.train`] and stops when it returns or raises.

    Args:
        on_group: called in a background thread with each finished and scored [`~trl_a3po.Group`] of training, one at
            a time. It returns `None` to accept the group, a [`~trl_a3po.Rejection`] with a reason to have another
            prompt's group take its place, or a changed group (rollouts and score) to train on instead.

    Raises:
        ValueError: what asynchronous generation does not support: tools, environments, `rollout_func`, multimodal
            models, FSDP.
        EngineError: the engine cannot sample any more.
        RewardError: a reward function raised or returned something else than one number per completion.
        StallError: nothing moved for `stall_timeout` seconds; the message says who waits for whom.
    """

    _tag_names: ClassVar = ["trl", "grpo", "a3po"]
    _name = "A3PO"
    _paper: ClassVar = {
        "title": "A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation",
        "id": "2512.06547",
        "citation": (
            "@article{a3po2025,\n"
            "    title         = {A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy "
            "Approximation},\n"
            "    year          = {2025},\n"
            "    eprint        = {2512.06547},\n"
            "    archivePrefix = {arXiv},\n"
            "}"
        ),
    }

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: A3POConfig | None = None,
        *arguments,
        on_group: OnGroup | None = None,
        **options,
    ):
        args = args if args is not None else A3POConfig("trainer_output")
        others = dict(zip(argument_names(GRPOTrainer)[3:], arguments, strict=False)) | options
        check_arguments(model, reward_funcs, args, others)
        check_on_group(on_group)
        super().__init__(model, reward_funcs, args, **others)
        check_sharding(self.is_fsdp_enabled)
        aux_loss = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        check_periodic(args, deepspeed=self.is_deepspeed_enabled, aux_loss=aux_loss)
        check_processing_class(self.processing_class)
        check_dataset(args, self.train_dataset, self.processing_class)
        check_columns("eval_dataset", self.eval_dataset)
        prevent_repacking(self.accelerator.unwrap_model(self.model))
        check_policy(args, self.accelerator.unwrap_model(self.model), sampling_settings(args, self.generation_config))
        check_reward_functions(args, reward_functions(self), self.reward_func_names)
        self.on_group = on_group
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        self._training_forward = TrainingForward(args, self.accelerator, models)
        self._team = Team(timeout=args.ddp_timeout + args.stall_timeout)
        self._running = self._trained_before = False
        self._session: Session | None = None  # of the main process
        self.add_callback(TimelineCallback(lambda: self._session and self._session.timeline))
        self._take_metrics: TakeMetrics | None = None  # of the session
        self._loss_metrics = LossMetrics(caches_are_kept=args.kv_on_publish != "recompute")
        self._take_number = 0  # of its generation batch
        self._scored = False  # a group of the generation batch being taken has a reward
        normalizes = args.schedule == "periodic" and args.loss_type in STEP_NORMALIZED_LOSS_TYPES
        self._normalizer = StepNormalizer(args.steps_per_generation) if normalizes else None
        self._resumed: RunState | None = None
        self._holds_push = False
        self._taken: list[Row] | None = None
        self._row_weights = RowWeights()
        self._loss_inputs: dict[str, Any] | None = None
        self._compared_at: int | None = None

    # --- a run's beginning and end ------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As GRPOTrainer's; `resume_from_checkpoint=True` takes the last checkpoint that was written whole, and a
        resumed run goes on exactly where it was saved: the same prompts, groups and half-used batch."""
        if self.args.dry_run:
            print(self.plan())
            return TrainOutput(self.state.global_step, 0.0, {})
        check_trained_before(self._trained_before, self.is_deepspeed_enabled)
        self._trained_before = True
        with RankWatch(self._team, cleanup=self.close):
            try:
                folder = self._resume(resume_from_checkpoint)
                return super().train(str(folder) if folder else None, *args, **kwargs)
            finally:
                self.close()

    def _resume(self, resume_from_checkpoint: str | bool | None) -> Path | None:
        """Set this process to a run's beginning, or to where a checkpoint was saved, and return its folder."""
        if resume_from_checkpoint or self.args.save_strategy != SaveStrategy.NO:
            check_shared(self._team, Path(self.args.output_dir))
        folder = None
        if resume_from_checkpoint:
            folder = self._team.run_on_main(lambda: choose_checkpoint(resume_from_checkpoint, self.args.output_dir))
        else:
            self._team.run_on_main(lambda: warn_of_earlier_runs(self.args.output_dir))
        self._resumed = load_run(self, folder) if folder else None
        begin_run(self, self._resumed)
        return folder

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # resumed at its end: Trainer would train one more step
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)
        if not self._running and self._resumed is None:  # Trainer would end such a run with a warning
            raise ValueError(
                f"train_dataset holds fewer than the {self.args.groups_per_batch} prompts of one generation batch: "
                "give it more rows, or set a smaller generation_batch_size."
            )

    def plan(self) -> str:
        """What the run resolves to, for a person: batches, staleness, engine, training forward, memory."""
        model = self.accelerator.unwrap_model(self.model)
        dtype = engine_dtype(self.args, model, self.accelerator.mixed_precision)
        processes, forward = self.accelerator.num_processes, self._training_forward.description(model)
        return trainer_plan(
            self.args, model, engine_slots(self.args), dtype.itemsize, forward, processes, zero_stage(self)
        )

    def close(self) -> None:
        """Stop generating and free the engine. Called at the end of `train`; idempotent."""
        self._running, self._taken, self._resumed, self._compared_at = False, None, None, None
        if self._session is not None:
            self._session.close()  # again at the next call, if this one is interrupted
            self._session = None

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        if not self._running:  # outside of training there is no queue to save
            with named_on_error("Saving a checkpoint", self._get_output_dir(trial=trial)):
                super()._save_checkpoint(model, trial)
            return
        version, run_dir = self.state.global_step, self._get_output_dir(trial=trial)
        folder = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{version}"
        self._show_row_weights()
        with written_whole(self, folder):
            save_run(self, folder)
            with rotation_held(self.args), self._push_held():
                super()._save_checkpoint(model, trial)
            if self.args.should_save:
                torch.save(self.args, folder / TRAINING_ARGS_NAME)  # again, with its save_total_limit
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            with named_on_error("Deleting older checkpoints", run_dir):
                rotate_checkpoints(run_dir, self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    def _load_from_checkpoint(self, *args, **kwargs):
        with keep_trained_dtypes(self.model):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self):
        with keep_trained_dtypes(self.model):
            super()._load_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        if _internal_call:  # part of a checkpoint, which names its folder
            super().save_model(output_dir, _internal_call)
            return
        with named_on_error("Saving the model", output_dir or self.args.output_dir):
            super().save_model(output_dir, _internal_call)

    @contextmanager
    def _push_held(self) -> Iterator[None]:
        self._holds_push = True
        try:
            yield
        finally:
            self._holds_push = False

    def _push_from_checkpoint(self, checkpoint_folder):
        if not self._holds_push:  # a checkpoint is pushed when it is complete
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args, **kwargs):
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            model = base_model(self.accelerator.unwrap_model(self.model))
            folder = self.args.output_dir
            complete_model_card(Path(folder) / "README.md", type(model).__name__, self.hub_model_id or folder)

    # --- taking a batch -----------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch):
        if self.model.training:
            if not self._running:
                with self._timed("a3po/time/engine_start"):
                    self._start_session()
            if self._takes_now():
                generation_batch = self._take()
        elif self._running:
            self._sample_evaluation(generation_batch)
        if self.model.training and self.args.schedule == "periodic":
            return self._prepare_micro_step(generation_batch)
        takes = self.model.training and self._takes_now()
        inputs = super()._prepare_inputs(generation_batch)
        if not takes:
            return inputs
        self._buffered_inputs = self._training_forward.arranged(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _prepare_micro_step(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The micro-batch of `rows` alone: all of TRL's preparation, the reference forward included, happens for the
        groups that are there, while others are still being sampled."""
        steps, self.args.steps_per_generation = self.args.steps_per_generation, 1
        try:
            inputs = super()._prepare_inputs(rows)
        finally:
            self.args.steps_per_generation = steps
        if self._normalizer is None:
            return inputs
        tokens = self._normalizer.guess(self._step % steps, inputs["num_items_in_batch"])
        return {**inputs, "num_items_in_batch": tokens}

    def training_step(self, model, inputs, num_items_in_batch):
        number = self._step % self.args.steps_per_generation
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss if self._normalizer is None else self._normalizer.correct(number, loss, model.parameters())

    def _start_session(self) -> None:
        policy = trained_policy(self)

        def start():
            self._session = Session(self, policy, self._resumed)

        self._running = True
        self._take_metrics = TakeMetrics(is_vllm=self.args.engine == "vllm")
        self._team.run_on_main(start)

    def _takes_now(self) -> bool:
        return self._step % self.args.micro_steps_per_take == 0 or self._buffered_inputs is None

    def _take(self) -> list[dict[str, Any]]:
        """Publish, then take: this process's rows, one per rollout, stand in for the dataloader's."""
        version = self.state.global_step
        self._take_number = self._step // self.args.micro_steps_per_take % self.args.takes_per_generation
        if self._take_number == 0:
            with self._timed("a3po/time/publish"):
                self._team.run_on_main(lambda: self._session.publish_if_due(version))
        began = time.perf_counter()
        groups = self._team.run_on_main(lambda: self._trainable(self._checked(self._session.take(version))))
        waited = time.perf_counter() - began
        metrics, first = self._metrics["train"], self._take_number == 0
        add_seconds(metrics, "a3po/time/wait", waited, first=first)
        if self._team.is_main:
            self._take_metrics.add(metrics, self._session, groups, waited, first=first)
        if first:
            self._row_weights.clear()
        rows = balanced_rows(groups, self._team.size, self.model.config.get_text_config().hidden_size)
        self._taken = rank_share(rows, self._team.rank, self._team.size)
        return [dict(group.prompt.example) for group, _ in self._taken]

    def _sample_evaluation(self, rows: list[dict[str, Any]]) -> None:
        """Have this process's share of an evaluation batch sampled with the others'."""
        gathered = self._team.gather(rows)
        groups = self._team.run_on_main(
            lambda: self._checked(self._session.evaluate(self, list(itertools.chain(*gathered))))
        )
        sampled = [(group, number) for group in groups for number in range(len(group.rollouts))]
        self._taken = rank_share(sampled, self._team.rank, self._team.size)
        self._show_row_weights()
        self._row_weights.forget_places()

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        if self._running:
            self._team.run_on_main(lambda: self._session.end_evaluation())
        return output

    def _checked(self, groups: list[Group]) -> list[Group]:
        check_completions(groups, self.max_completion_length, self.model.config.get_text_config().vocab_size)
        return groups

    def _trainable(self, groups: list[Group]) -> list[Group]:
        self._scored = has_reward(groups) or (self._scored and self._take_number > 0)
        last = self._take_number + 1 == self.args.takes_per_generation
        if last and all(reward_functions(self)):  # a reward model scores later
            check_some_reward(self._scored, self.reward_func_names)
        return groups

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._taken is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if [list(ids) for ids in prompt_ids] != [group.prompt.token_ids for group, _ in self._taken]:
            raise RuntimeError(
                "The prompts of the batch tokenise differently now than when they were submitted to the engine: the "
                "tokenizer or chat template must not change during training."
            )
        rollouts = rollouts_of(self._taken)
        return [list(rollout.token_ids) for rollout in rollouts], [list(rollout.logps) for rollout in rollouts]

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self._taken is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        replay_logs(self._taken, self._log_completion_extra, self._log_metric)
        if self.log_completions:
            for column, values in completion_columns(self._taken, self.state.global_step).items():
                self._log_completion_extra(column, values)
        reward_funcs = self.reward_funcs
        self.reward_funcs = [
            func if isinstance(func, nn.Module) else replayed_rewards(self._taken, column)
            for column, func in enumerate(reward_funcs)
        ]
        try:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = reward_funcs

    def _generate_and_score_completions(self, inputs):
        if self._taken is None:
            return super()._generate_and_score_completions(inputs)
        compares = self._starts_comparison()
        with self._old_logps_only_if(self.args.recomputes_proximal or compares):
            batch = super()._generate_and_score_completions(inputs)
        if compares:
            batch["compared_logps"] = batch.pop("old_per_token_logps")
        taken, self._taken = self._taken, None
        rows, length = batch["completion_ids"].shape
        if self.log_completions and self.model.training:
            first = (self._take_number * self._team.size + self._team.rank) * rows
            batch["log_row"] = torch.arange(first, first + rows, device=batch["completion_ids"].device)
        batch["behavior_versions"] = behavior_versions(taken, length).to(batch["completion_ids"].device)
        batch["staleness"] = token_staleness(batch["behavior_versions"], self.state.global_step)
        return batch

    def _starts_comparison(self) -> bool:
        """Whether this batch is one in which `compare_proximal_every` has the anchor compared."""
        every, version = self.args.compare_proximal_every, self.state.global_step
        if not every or not self.model.training:
            return False
        due = self._compared_at is None or version // every > self._compared_at // every
        if due:
            self._compared_at = version
        return due

    @contextmanager
    def _old_logps_only_if(self, wanted: bool) -> Iterator[None]:
        """TRL runs a forward for the old log-probs when accumulation and generation are not aligned; inside
        `_generate_and_score_completions` these two numbers decide nothing else."""
        steps, iterations = self.args.steps_per_generation, self.num_iterations
        misaligned = self.args.gradient_accumulation_steps + 1
        self.args.steps_per_generation, self.num_iterations = (misaligned if wanted else 1), 1
        try:
            yield
        finally:
            self.args.steps_per_generation, self.num_iterations = steps, iterations

    # --- the loss -----------------------------------------------------------------------------------------------

    def _compute_loss(self, model, inputs):
        if "behavior_versions" not in inputs:
            return super()._compute_loss(model, inputs)
        inputs = self._loss_inputs = dict(inputs)
        try:
            loss = super()._compute_loss(model, inputs)
            if self._loss_inputs is not None:
                raise RuntimeError(
                    "GRPOTrainer._compute_loss did not ask for log-probs: the objective was not applied."
                )
        finally:
            self._loss_inputs = None
        return loss

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        padded = super()._get_per_token_logps_and_entropies
        outputs = self._training_forward(padded, model, input_ids, *args, **kwargs)
        # Once per loss: TRL reads the anchor and the advantages after this call.
        inputs, self._loss_inputs = self._loss_inputs, None
        if inputs is not None:
            self._apply_objective(outputs[0], inputs)
        return outputs

    def _apply_objective(self, policy_logps: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Give `inputs` the anchor and the weighted advantages that TRL's loss makes the objective's of."""
        advantages, version = inputs["advantages"], self.state.global_step
        epsilons = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        anchor, weight, stats = chosen_anchor(
            self.args,
            policy_logps,
            inputs["sampling_per_token_logps"],
            inputs["staleness"],
            advantages,
            inputs["completion_mask"],
            recomputed_logps=inputs.get("old_per_token_logps"),
            **epsilons,
        )
        inputs["old_per_token_logps"], inputs["advantages"] = anchor, advantages.unsqueeze(1) * weight
        if "log_row" in inputs:
            self._row_weights.add(inputs["log_row"], weight, inputs["completion_mask"])
        if not self.model.training:
            return
        taken_at = int((inputs["behavior_versions"] + inputs["staleness"]).max())
        self._loss_metrics.add(stats, policy_logps, inputs, version)
        if "compared_logps" in inputs:
            minibatch = "first" if taken_at == version else "later"
            self._loss_metrics.compare(minibatch, policy_logps, anchor, advantages, inputs, **epsilons)
        self._metrics["train"]["a3po/drift"].append(float(version - taken_at))
        self._metrics["train"]["a3po/forward/token_ratio"].append(self._training_forward.token_ratio)

    # --- metrics ------------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._metrics["train"][name].append(time.perf_counter() - started)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training and not self._loss_metrics.empty:
            for name, value in self._loss_metrics.collect(self._team).items():
                self._metrics["train"][name].append(value)
            self._show_row_weights()
        super().log(logs, start_time)
        if self._session is not None:
            self._session.timeline.log(self.state.log_history[-1])

    def _show_row_weights(self) -> None:
        if self.log_completions and self._row_weights.places_known and self._logs["extra"]["w"]:
            self._row_weights.show(self._team, self._logs["extra"]["w"])
