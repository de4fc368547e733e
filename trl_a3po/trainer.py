"""`A3POTrainer`: TRL's `GRPOTrainer` fed by an engine that runs ahead of training.

Thin hooks around `super()`, in the order in which a batch meets them:

1. `_prepare_inputs`: at the first micro-step of a generation batch, publish the weights, then take the batch. With
   `schedule="periodic"`, take the groups of each micro-step at that micro-step.
2. `_generate_and_score_completions`: let TRL prepare the batch, then add each token's version and staleness to it.
3. `_generate_single_turn` and `_calculate_rewards`, which TRL calls meanwhile: give TRL the completions and the
   rewards that have already been computed.
4. `training_step`: with `schedule="periodic"`, correct the normaliser of the loss after the backward pass.
5. `_compute_loss` and, inside it, `_get_per_token_logps_and_entropies`: from TRL's only forward pass, give TRL's loss
   the objective's anchor as `old_per_token_logps` and the objective's weight on the advantages.
6. `log`: add the metrics of the optimizer step to TRL's.

`ReplayHooks` has those of 2 and 3, and `CheckpointHooks` those that save and load.

Guarantees: rewards, advantages, losses, normalisers, KL, entropy terms and logging stay TRL's; there is no second
forward pass of the policy except for `proximal_method="recompute"`; there are no maths and no threads here.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)
from transformers.integrations import integration_utils
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy, TrainOutput
from trl import GRPOTrainer
from trl.trainer.utils import get_callable_name

from trl_a3po._compat import check_hooks
from trl_a3po.checkpoints.choose_checkpoint import choose_checkpoint, warn_of_earlier_runs
from trl_a3po.checks.arguments import (
    check_arguments,
    check_environments,
    check_on_group,
    check_processing_class,
    check_reward_functions,
    check_tool_names,
)
from trl_a3po.checks.changed_arguments import SettingsInUse
from trl_a3po.checks.completions import check_completions, check_some_reward, has_reward
from trl_a3po.checks.data import check_columns, check_dataset
from trl_a3po.checks.images import check_mixed_images
from trl_a3po.checks.noise import warn_of_noise
from trl_a3po.checks.overrides import (
    check_begun,
    check_in_step,
    check_overrides,
    check_own_loss,
    check_prepared,
    check_thread,
)
from trl_a3po.checks.policy import (
    check_evaluated,
    check_head,
    check_parallelism,
    check_policy,
    check_sharding,
    check_shards,
    check_trained_before,
)
from trl_a3po.config import A3POConfig
from trl_a3po.config.check_schedule import check_periodic
from trl_a3po.config.plan import table
from trl_a3po.distributed.rank_shares import balanced_rows
from trl_a3po.distributed.rank_watch import RankWatch
from trl_a3po.distributed.shared_folder import check_shared
from trl_a3po.distributed.team import Team
from trl_a3po.episodes.episode import RolloutFunction
from trl_a3po.errors import Terminated
from trl_a3po.forward.training import TrainingForward
from trl_a3po.models.fsdp_groups import groups_complete
from trl_a3po.models.mode import mode_of_this_thread
from trl_a3po.models.sharded import keep_output_dtypes, load_as_launched, load_in_every_process, reshard
from trl_a3po.objectives.inputs import per_token
from trl_a3po.planning.earlier_run import forecast_from_earlier_run
from trl_a3po.protocol.records import Group
from trl_a3po.publish.quantised import prevent_repacking
from trl_a3po.report.at_a_glance import LogEvent
from trl_a3po.report.completions_table import make_contents_alike
from trl_a3po.report.loss_metrics import LossMetrics
from trl_a3po.report.progress import restart_clocks
from trl_a3po.report.rollout_log import RolloutLog, RolloutLogCallback, kept_share
from trl_a3po.report.run_timeline import TimelineCallback
from trl_a3po.report.take_metrics import TakeMetrics, add_seconds
from trl_a3po.report.timeline import end_if_left
from trl_a3po.report.tracker_names import in_sections
from trl_a3po.report.trackio_traces import TrackioTraces
from trl_a3po.report.trainer_plan import trainer_plan
from trl_a3po.rewards.recorded import RecordedReward
from trl_a3po.rollout.batch_rows import (
    example_of,
    trained_mask,
)
from trl_a3po.rollout.group_filter import OnGroup
from trl_a3po.session import Session
from trl_a3po.session.build_engine import (
    engine_dtype,
    engine_slots,
    queue_rules,
    shared_with_engine,
    split_of,
)
from trl_a3po.session.build_episodes import closing_environments_on_error, remove_close_from_tools, runs_episodes
from trl_a3po.session.build_policy import build_policy, is_partitioned, policy_size, zero_stage
from trl_a3po.session.build_scorer import (
    add_recorded_reward,
    new_reward_thread,
    reward_functions,
    reward_list,
)
from trl_a3po.session.closing import close_after_error, end_with_users_line
from trl_a3po.session.current_batch import CurrentBatch
from trl_a3po.session.evaluation import EvaluatedRows, EvaluatedStream
from trl_a3po.session.image_memory import image_memory
from trl_a3po.session.loss_inputs import LossInputs
from trl_a3po.session.prompt_rows import check_all_rows
from trl_a3po.session.replay_hooks import ReplayHooks
from trl_a3po.session.resuming import RunState, begin_run, load_run
from trl_a3po.session.sampling import sampling_settings
from trl_a3po.session.temporarily import temporarily
from trl_a3po.session.termination import StopRequested, Termination
from trl_a3po.session.train_rows import TrainRows, counted_dataset, train_rows, without_rows
from trl_a3po.step_normalizer import STEP_NORMALIZED_LOSS_TYPES, StepNormalizer

check_hooks(GRPOTrainer)

logger = logging.getLogger(__name__)

TrainDataset: TypeAlias = Dataset | IterableDataset
EvalDataset: TypeAlias = TrainDataset | DatasetDict | IterableDatasetDict | dict[str, TrainDataset]
EnvironmentFactory = Callable[[], Any]
RewardFunction = str | PreTrainedModel | Callable[..., Any]
"""A function, a reward model or its name. Unlike with TRL's annotation, a function may return `list[float]`."""


class A3POTrainer(ReplayHooks, GRPOTrainer):
    """
    Trainer for asynchronous RL with staleness-aware policy optimization (A-3PO, arXiv 2512.06547).

    The arguments are those of [`~trl.GRPOTrainer`], with `args` an [`A3POConfig`]. Generation starts with
    [`~A3POTrainer.train`] and stops when it returns or raises.

    Args:
        processing_class: a tokenizer, or the processor of a vision-language model, whose prompts may have images
            (docs/vision.md).
        rollout_func: an `async` function that plays one [`~trl_a3po.episodes.Episode`] and returns its reward, or an
            [`~trl_a3po.episodes.EpisodeResult`]. The reward is a column of its own, beside those of `reward_funcs`.
        on_group: called in a background thread with each finished and scored [`~trl_a3po.Group`] of training, one at
            a time. It returns `None` to accept the group, a [`~trl_a3po.Rejection`] with a reason to have another
            prompt's group take its place, or a changed group (rollouts and score) to train on instead.

    Raises:
        ValueError: a setting, an argument or the dataset cannot be used, or is not supported with asynchronous
            generation: a synchronous `rollout_func`, video and audio, FSDP1.
        A3POError: the run cannot continue. `trl_a3po.errors` lists what can be raised while training is under way.
    """

    args: A3POConfig
    _take_metrics: TakeMetrics  # of the session, set when it starts

    _tag_names = ["trl", "grpo", "a3po"]  # noqa: RUF012  # declared as in TRL
    _name = "A3PO"
    _paper = {  # noqa: RUF012
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
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunction | list[Any] | None = None,
        args: A3POConfig | None = None,
        train_dataset: TrainDataset | None = None,
        eval_dataset: EvalDataset | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
        *,
        on_group: OnGroup | None = None,
    ) -> None:
        args = args if args is not None else A3POConfig("trainer_output")
        check_arguments(
            model,
            reward_funcs,
            args,
            processing_class=processing_class,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        check_on_group(on_group)
        self.rollout = rollout_func
        functions = reward_list(reward_funcs)
        self._recorded_from = len(functions)  # the first column of rewards that episodes give themselves
        if self.rollout is not None and not functions:
            functions = [RecordedReward(get_callable_name(self.rollout))]
        with closing_environments_on_error(self):
            with temporarily(args, enable_jit_checkpoint=False):  # `Termination` does this, at a step's end only
                super().__init__(
                    model,
                    functions,
                    args,
                    train_dataset=train_dataset,
                    eval_dataset=eval_dataset,
                    processing_class=processing_class,
                    reward_processing_classes=reward_processing_classes,
                    callbacks=callbacks,
                    optimizers=optimizers,  # type: ignore[arg-type]  # Trainer takes any scheduler
                    quantization_config=quantization_config,
                    peft_config=peft_config,
                    tools=tools,
                    environment_factory=environment_factory,
                )
            self._complete(on_group)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        check_sharding(self._fsdp_plugin)
        keep_output_dtypes(self._fsdp_plugin)
        load_in_every_process(self._fsdp_plugin)  # TRL loads the reference model next

    @property
    def _fsdp_plugin(self) -> Any | None:
        return self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with groups_complete():
            prepared = super()._prepare_for_training(*args, **kwargs)
        check_head(self.accelerator.unwrap_model(self.model))
        return prepared

    def _complete(self, on_group: OnGroup | None) -> None:
        """Check what TRL has built, and build the rest. The engine starts with training."""
        args = self.args
        load_as_launched(self._fsdp_plugin)
        add_recorded_reward(self)
        remove_close_from_tools(self)
        check_parallelism(self.get_tp_size(), self.get_cp_size(), self.get_sp_size())
        aux_loss = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        check_periodic(args, deepspeed=self.is_deepspeed_enabled, aux_loss=aux_loss)
        check_processing_class(self.processing_class)
        check_dataset(args, self.train_dataset, self.processing_class, needs_prompt=not self.environment_factories)
        check_columns(
            "eval_dataset", self.eval_dataset, self.processing_class, needs_prompt=not self.environment_factories
        )
        prevent_repacking(self.accelerator.unwrap_model(self.model))
        check_overrides(self, A3POTrainer)
        self.on_group = on_group
        models: list[nn.Module] = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        self._training_forward = TrainingForward(args, self.accelerator, models, shows_images=self._is_vlm)
        policy = self.accelerator.unwrap_model(self.model)
        check_shards(args, self.is_fsdp_enabled, policy)
        check_policy(args, policy, sampling_settings(args, self.generation_config, policy))
        if self.accelerator.is_main_process:
            warn_of_noise(args, policy)
        check_reward_functions(args, reward_functions(self), self.reward_func_names)
        if self.environment_factories:
            functions, names = reward_functions(self), self.reward_func_names
            check_environments(args, functions, names, self.environment_factories)
            check_tool_names(self._standalone_tools, self._env_tools)
        self._team = Team(timeout=args.ddp_timeout + args.stall_timeout)
        self._running = self._trained_before = self._has_evaluated = False
        self._reward_thread = new_reward_thread()
        self._session: Session | None = None  # in the main process, during training
        self._training_thread: int | None = None  # during training
        self.add_callback(TimelineCallback(lambda: None if self._session is None else self._session.timeline))
        self._termination = Termination(self._team.any, lambda: self._saves_checkpoints)
        self.add_callback(self._termination)
        self._traces = TrackioTraces(self._tokenizer, self.reward_func_names)
        self._rollout_log = RolloutLog(self._tokenizer, self.reward_func_names)
        self.add_callback(
            RolloutLogCallback(
                self._rollout_log, self._team, lambda: None if self._session is None else self._session.rollouts
            )
        )
        self._loss_metrics = LossMetrics(caches_are_kept=args.kv_on_publish != "recompute")
        normalizes = args.schedule == "periodic" and args.loss_type in STEP_NORMALIZED_LOSS_TYPES
        self._normalizer = StepNormalizer(args.steps_per_generation) if normalizes else None
        self._settings = SettingsInUse(args)
        self._resumed: RunState | None = None
        self._train_rows: TrainRows | None = None  # during training
        self._current_batch = CurrentBatch()
        self._loss_inputs: LossInputs | None = None  # of TRL's loss, until it has asked for the log-probs
        self._micro_batch: LossInputs | None = None  # what the loss of this micro-step was given
        self._objective_applied = self._own_loss_reported = self._in_step = False
        check_all_rows(self)

    # --- a run's beginning and end ------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, as `GRPOTrainer.train` does.

        A resumed run continues exactly where it was saved, with the same prompts, groups and half-used batch.

        Args:
            resume_from_checkpoint: the path of a checkpoint, or `True` for the newest valid one in `output_dir`.

        Raises:
            Terminated: the process received SIGTERM. The run has saved a checkpoint and has ended.
        """
        if self.args.dry_run:
            print(self.plan())
            return TrainOutput(self.state.global_step, 0.0, {})
        check_overrides(self, A3POTrainer)
        check_trained_before(self._trained_before, self.is_deepspeed_enabled)
        self._settings.begin_training(self)
        check_reward_functions(self.args, reward_functions(self), self.reward_func_names)
        self._trained_before = True
        watch = RankWatch(self._team, cleanup=self.close)
        thread = temporarily(self, _training_thread=threading.get_ident())
        with mode_of_this_thread(self.model), self._termination.listening(), watch, thread:
            try:
                folder = self._resume(resume_from_checkpoint)
                self._train_rows = train_rows(self, self._resumed)
                output = self._until_terminated(super().train, str(folder) if folder else None, *args, **kwargs)
            except BaseException as error:
                close_after_error(self.close)
                end_with_users_line(error)
                raise
            self.close()
        if output is None:
            if self._termination.interrupted:
                raise KeyboardInterrupt
            terminated = Terminated(self._terminated_at())
            logger.warning("%s", terminated)
            raise terminated
        return output

    def _until_terminated(self, train: Callable[..., TrainOutput], *args: Any, **kwargs: Any) -> TrainOutput | None:
        """What `train` returns, or `None` if a signal has ended it; what it trained is then saved."""
        try:
            return train(*args, **kwargs)
        except StopRequested:
            if self._termination.should_save(self.state.global_step):
                self._save_checkpoint(self.model, trial=None)
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            return None

    def _terminated_at(self) -> str:
        step = self.state.global_step
        if step == 0 or not self._saves_checkpoints:
            return f"SIGTERM ended the run after optimizer step {step}, without a checkpoint of that step."
        return f"SIGTERM ended the run after optimizer step {step}; resume_from_checkpoint=True goes on from there."

    @property
    def _saves_checkpoints(self) -> bool:
        return self.args.save_strategy != SaveStrategy.NO or self.args.enable_jit_checkpoint

    def _resume(self, resume_from_checkpoint: str | bool | None) -> Path | None:
        """Set this process to the beginning of a new run, or to the moment at which a checkpoint was saved. Returns
        the folder of that checkpoint."""
        if resume_from_checkpoint or self._saves_checkpoints:
            check_shared(self._team, Path(self.args.output_dir))
        folder = None
        if resume_from_checkpoint:
            folder = self._team.run_on_main(lambda: choose_checkpoint(resume_from_checkpoint, self.args.output_dir))
        else:
            self._team.run_on_main(lambda: warn_of_earlier_runs(self.args.output_dir))
        self._resumed = load_run(self, folder) if folder else None
        begin_run(self, self._resumed)
        return folder

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # resumed at the end: Trainer would train one more step
            self.control.should_training_stop = True
            if not self._running:
                self._team.run_on_main(lambda: end_if_left(Path(self.args.output_dir)))
            return
        super()._run_epoch(*args, **kwargs)
        if not self._running and self._resumed is None:  # Trainer would end such a run with a warning
            raise ValueError(
                f"train_dataset holds fewer than the {self.args.groups_per_batch} prompts of one generation batch: "
                "give it more rows, or set a smaller generation_batch_size."
            )

    def plan(self) -> str:
        """What the settings amount to, as a text: batches, staleness, engine, training forward pass, memory; and the
        time of a step, if `output_dir` holds an earlier run to forecast it from."""
        model = self.accelerator.unwrap_model(self.model)
        dtype = engine_dtype(self.args, model, self.accelerator.mixed_precision)
        processes, forward = self.accelerator.num_processes, self._training_forward.description(model)
        stage, fsdp = zero_stage(self), self.is_fsdp_enabled
        shared = 0 if is_partitioned(self) else shared_with_engine(self.args, model, self.accelerator.device, dtype)
        optimizer = None if self.optimizer is None else type(self.optimizer).__name__
        plan = trainer_plan(
            self.args,
            model,
            engine_slots(self.args),
            dtype.itemsize,
            forward,
            processes,
            stage,
            shared,
            optimizer,
            fsdp=fsdp,
        )
        rules, split = queue_rules(self.args, episodes=runs_episodes(self)), split_of(self.args, processes)
        more = {
            "images": image_memory(self),
            "forecast": forecast_from_earlier_run(self.args.output_dir, rules, split, policy_size(self)),
        }
        return "\n".join([plan, *(table({name: line}) for name, line in more.items() if line is not None)])

    def close(self) -> None:
        """Stop generating and free the engine. `train` calls it when it ends. Idempotent."""
        self._running, self._resumed, self._current_batch = False, None, CurrentBatch()
        self._train_rows = None
        self._has_evaluated, self._trained_version = False, None
        if self._session is not None:
            self._session.close()
            self._session = None  # only now: if closing is interrupted, the next call closes the session again
        self._training_forward.release()

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, *args: Any, **kwargs: Any
    ) -> DataLoader[Any]:
        make = super()._get_dataloader
        if description == "Evaluation" and self._is_vlm:
            stored, order = isinstance(dataset, Dataset), (self.num_generations_eval, self.args.seed)
            dataset = EvaluatedRows(dataset) if stored else EvaluatedStream(dataset, *order)
        if description != "Training" or self._train_rows is None:
            return make(dataset, description, batch_size, sampler_fn, *args, **kwargs)
        counted = counted_dataset(self, self._train_rows, dataset)
        with without_rows(self):
            return make(counted, description, batch_size, lambda _: sampler_fn(dataset), *args, **kwargs)

    # --- taking a batch -----------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        prepared = self._prepared_inputs(generation_batch)
        if "behavior_versions" not in prepared:  # an evaluation outside of training
            return prepared
        inputs = dict(prepared)
        if self.args.recomputes_proximal:
            inputs["recomputed_logps"] = inputs["old_per_token_logps"]
        # What a loss of the user's own corrects for; TRL's loss is given the objective's anchor.
        inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        self._micro_batch, self._objective_applied = LossInputs(inputs), False
        return self._micro_batch

    def _prepared_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if self.model.training:
            check_in_step(type(self).__name__, self._in_step)
            if not self._running:
                check_begun(type(self).__name__, self._train_rows)
                self._start_session_untimed()
            self._end_evaluations()
            if self._take_is_due():
                generation_batch = self._take()
            self._trained_version = self.state.global_step
        elif self._running:
            generation_batch = self._sample_evaluation(generation_batch)
        if self.model.training and self.args.schedule == "periodic":
            return self._prepare_micro_step(generation_batch)
        begins_batch = self.model.training and self._take_is_due()
        inputs = super()._prepare_inputs(generation_batch)
        if not begins_batch:
            return inputs
        slices = self._buffered_inputs = self._training_forward.arranged(self._buffered_inputs)
        return slices[self._step % self.args.steps_per_generation]

    def _prepare_micro_step(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The micro-batch of `rows` alone. TRL prepares it, reference forward pass included, while the groups of later
        micro-steps are still being sampled."""
        with temporarily(self.args, steps_per_generation=1):
            inputs = super()._prepare_inputs(rows)
        if self._normalizer is None:
            return inputs
        number = self._step % self.args.steps_per_generation
        return {**inputs, "num_items_in_batch": self._normalizer.guess(number, inputs["num_items_in_batch"])}

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        self._settings.check(self)
        number, self._micro_batch = self._step % self.args.steps_per_generation, None
        with temporarily(self, _in_step=True):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._check_loss()
        return loss if self._normalizer is None else self._normalizer.correct(number, loss, model.parameters())

    def _check_loss(self) -> None:
        """Raise an error if what was trained was not a batch of the engine, or was trained without a correction."""
        name, inputs = type(self).__name__, self._micro_batch
        check_prepared(name, inputs is not None)
        if inputs is None or self._objective_applied:
            return
        check_own_loss(name, inputs.read, inputs["staleness"])
        if not self._own_loss_reported:
            self._own_loss_reported = True
            logger.warning(
                "%s trains a loss of its own, which does not call super()._compute_loss: the settings of objective=%r "
                "do not apply, and inputs['old_per_token_logps'] holds the log-probs of the policy that sampled the "
                "tokens.",
                name,
                self.args.objective,
            )

    def _start_session_untimed(self) -> None:
        """Start the session, without counting its seconds into the time of the step or into the progress bar's."""
        with self._timed("a3po/time/engine_start"):
            self._start_session()
        self._current_train_step_time -= self._metrics["train"]["a3po/time/engine_start"][-1]
        restart_clocks(self.callback_handler.callbacks)

    def _start_session(self) -> None:
        policy = build_policy(self)

        def start() -> None:
            self._session = Session(self, policy, self._resumed)

        self._running = True
        self._rollout_log.begin_run(kept_share(self.args, self.state.max_steps))
        self._take_metrics = TakeMetrics(is_vllm=self.args.engine == "vllm")
        self._team.run_on_main(start)

    @property
    def _main_session(self) -> Session:
        """The session. Only in the main process, during training."""
        assert self._session is not None, "no session is running in this process"
        return self._session

    def _take_is_due(self) -> bool:
        return self._step % self.args.micro_steps_per_take == 0 or self._buffered_inputs is None

    def _take(self) -> list[dict[str, Any]]:
        """Publish, then take. Returns this process's rows, one per rollout, which replace those of the dataloader."""
        version, batch = self.state.global_step, self._current_batch
        batch.take_number = self._step // self.args.micro_steps_per_take % self.args.takes_per_generation
        if batch.at_first_take:
            gaps = self._team.gather(self._loss_metrics.batch_gap()) or ()
            self._team.run_on_main(lambda: self._main_session.see_gaps(gaps))
            with self._timed("a3po/time/publish"):
                self._team.run_on_main(lambda: self._main_session.publish_if_due(version))
        began = time.perf_counter()
        groups = self._team.run_on_main(lambda: self._trainable(self._checked(self._main_session.take(version))))
        waited = time.perf_counter() - began
        metrics, first = self._metrics["train"], batch.at_first_take
        add_seconds(metrics, "a3po/time/wait", waited, first=first)
        if self._team.is_main:
            self._take_metrics.add(metrics, self._main_session, groups, waited, first=first)
            if "trackio" in (self.args.report_to or ()):
                self._traces.taken(groups, version)
        if first:
            batch.row_weights.clear()
        self._rollout_log.begin_take(groups, first=first)
        rows = balanced_rows(groups, self._team.size, self.model.config.get_text_config().hidden_size)
        taken = batch.take_share(rows, self._team.rank, self._team.size)
        check_mixed_images(rows, partitioned=self._is_partitioned)
        if self.environment_factories and self._team.is_main:
            environments: Any = self._main_session.environments_of(taken)
            self.environments = environments
        return [example_of(row) for row in taken]

    @property
    def _is_partitioned(self) -> bool:
        return self.is_fsdp_enabled or zero_stage(self) == 3

    def _end_evaluations(self) -> None:
        """Have the engine sample from the trained weights again if evaluations have had it sample from others."""
        if self._has_evaluated:
            self._has_evaluated, version = False, self.state.global_step
            self._team.run_on_main(lambda: self._main_session.end_evaluations(version))

    def _sample_evaluation(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Have this process's share of an evaluation batch sampled together with the shares of the others. Returns the
        rows, with their prompts as they were sampled from."""
        gathered = self._team.gather(rows)
        self._has_evaluated = True

        def sample() -> list[Group]:
            assert gathered is not None, "the main process receives the rows of all processes"
            return self._checked(self._main_session.evaluate(self, list(itertools.chain(*gathered))))

        groups = self._team.run_on_main(sample)
        sampled = [(group, number) for group in groups for number in range(len(group.rollouts))]
        taken = self._current_batch.take_share(sampled, self._team.rank, self._team.size)
        check_mixed_images(sampled, partitioned=self._is_partitioned)
        self._show_row_weights()
        self._current_batch.row_weights.forget_places()
        return [example_of(row) for row in taken]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        check_thread("evaluate", self._training_thread)
        check_evaluated(self.is_fsdp_enabled, self.model)
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            if not self._running:
                self._training_forward.release()
        if self._running:
            self._team.run_on_main(lambda: self._main_session.end_evaluation())
        return output

    def _checked(self, groups: list[Group]) -> list[Group]:
        check_completions(groups, self.max_completion_length, self.model.config.get_text_config().vocab_size)
        return groups

    def _trainable(self, groups: list[Group]) -> list[Group]:
        batch = self._current_batch
        batch.has_reward = has_reward(groups) or (batch.has_reward and not batch.at_first_take)
        last = batch.take_number + 1 == self.args.takes_per_generation
        if last and all(reward_functions(self)):  # a reward model scores later
            check_some_reward(batch.has_reward, self.reward_func_names)
        return groups

    # --- the loss -----------------------------------------------------------------------------------------------

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if "behavior_versions" not in inputs:
            return super()._compute_loss(model, inputs)
        # TRL reads the advantages and the anchor after the log-probs, which is when the objective has put them there.
        inputs = self._loss_inputs = LossInputs(dict(inputs), not_ready=("advantages", "old_per_token_logps"))
        try:
            loss = super()._compute_loss(model, inputs)
            if self._loss_inputs is not None:
                raise RuntimeError(
                    "GRPOTrainer._compute_loss did not ask for log-probs: the objective was not applied."
                )
            if not {"advantages", "old_per_token_logps"} <= inputs.read:
                raise RuntimeError(
                    "GRPOTrainer._compute_loss did not read the advantages and the anchor after it asked for the "
                    'log-probs, so that the objective was not applied: pip install "trl>=1.16,<1.17".'
                )
        finally:
            self._loss_inputs = None
        self._objective_applied = True
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        padded = super()._get_per_token_logps_and_entropies
        outputs = self._training_forward(padded, model, input_ids, *args, **kwargs)
        if not torch.is_grad_enabled():
            reshard(model)
        # Only once per loss: TRL reads the anchor and the advantages after this call.
        inputs, self._loss_inputs = self._loss_inputs, None
        if inputs is not None:
            inputs.ready()
            policy_logps, entropies = outputs[:2]
            assert entropies is not None, "TRL's loss asks for entropies"
            self._apply_objective(policy_logps, entropies, inputs)
            inputs.read.clear()
        return outputs

    def _apply_objective(self, policy_logps: torch.Tensor, entropies: torch.Tensor, inputs: LossInputs) -> None:
        """Put the anchor and the weighted advantages into `inputs`, with which TRL's loss is the objective's."""
        advantages, version = inputs["advantages"], self.state.global_step
        epsilons = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        anchor, weight, stats = self.args.objective_record.anchor_and_weight(
            self.args,
            policy_logps,
            inputs["sampling_per_token_logps"],
            inputs["staleness"],
            advantages,
            trained_mask(inputs),
            recomputed_logps=inputs.get("recomputed_logps"),
            **epsilons,
        )
        inputs["old_per_token_logps"], inputs["advantages"] = anchor, per_token(advantages) * weight
        if "log_row" in inputs and self.log_completions:
            self._current_batch.row_weights.add(inputs["log_row"], weight, trained_mask(inputs))
        if not self.model.training:
            return
        if "log_row" in inputs:
            tokens = {"policy_logps": policy_logps, "weights": per_token(weight), "entropies": entropies}
            self._rollout_log.trained(inputs["log_row"], version, **tokens)
        taken_at = int((inputs["behavior_versions"] + inputs["staleness"]).max())
        self._loss_metrics.add(stats, policy_logps, entropies, inputs, version)
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
        check_thread("log", self._training_thread)
        if self.model.training and not self._loss_metrics.empty:
            for name, value in self._loss_metrics.collect(self._team).items():
                self._metrics["train"][name].append(value)
            self._show_row_weights()
        if self.log_completions and self._is_vlm:
            for column in ("prompt", "completion"):
                make_contents_alike(self._logs[column])
        event = LogEvent(self.callback_handler, shows_all=self.args.log_all_metrics)
        sections = in_sections(integration_utils.rewrite_logs)
        with temporarily(self, callback_handler=event), temporarily(integration_utils, rewrite_logs=sections):
            super().log(logs, start_time)
        if self._session is not None:
            self._session.timeline.log(event.entry)

    def _show_row_weights(self) -> None:
        weights = self._current_batch.row_weights
        if self.log_completions and weights.places_known and self._logs["extra"]["w"]:
            weights.show(self._team, self._logs["extra"]["w"])
