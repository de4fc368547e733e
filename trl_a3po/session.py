"""Putting a run together: from a trainer that is about to take its first batch to a queue that generates for it.

Guarantees: whatever was started is closed again when a later part fails; the settings of `GRPOConfig` reach the engine
with their meaning, or are refused; prompts come in GRPOTrainer's order for the same seed.
"""

import copy
import importlib.util
import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from transformers import GenerationConfig, TrainerState
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.trainer.utils import RepeatSampler

from trl_a3po.checks.data import check_prompt, check_prompt_ids
from trl_a3po.config import A3POConfig
from trl_a3po.engines.embedded.engine import TransformersEngine
from trl_a3po.engines.protocol import Engine, SamplingSettings
from trl_a3po.engines.several import SeveralEngines
from trl_a3po.engines.vllm.engine import VLLMEngine
from trl_a3po.errors import RewardError
from trl_a3po.publish.delivery import NUM_TEXTS, DeliveryCheck, KnownTokens, Policy
from trl_a3po.publish.trained import sent_spec
from trl_a3po.report.progress import told
from trl_a3po.resume import RunState
from trl_a3po.rollout.group_filter import GroupFilter
from trl_a3po.rollout.outcomes import Rejection
from trl_a3po.rollout.prompts import PromptStream
from trl_a3po.rollout.queue import GenerationQueue
from trl_a3po.rollout.records import Group, Prompt, Score
from trl_a3po.rollout.reward_workers import RewardWorkers
from trl_a3po.rollout.rewards import RewardScorer
from trl_a3po.rollout.takes import TakeClock

logger = logging.getLogger(__name__)

MOST_SLOTS = 64
EVALUATION_NOISE = 1 << 40  # noise keys that no prompt of the training stream reaches
GENERATION_KWARGS = {"min_new_tokens", "suppress_tokens", "eos_token_id"}


class Session:
    """Everything that runs beside one `train()` call: the engine, the queue and the reward functions' loop.

    Starts with the trainer's current weights; `close` stops all of it.

    Args:
        trainer: about to train its next micro-step.
        policy: its policy (`trained_policy`).
        resumed: the state to go on from.
    """

    def __init__(self, trainer, policy: Policy, resumed: RunState | None = None):
        args, version = trainer.args, trainer.state.global_step
        clock = take_clock(trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        sampling = sampling_settings(args, trainer.generation_config)
        self._policy = policy
        self._states = PublishedStates(trainer)
        self._scorer = build_scorer(trainer, self._states)
        # With a fixed lag every batch has a publish of its own.
        self._weight_sync_steps = args.weight_sync_steps if args.lag is None else 1
        self.evaluation_noise = EVALUATION_NOISE
        self._evaluated, self._evaluated_lost, self._told_of_lost = 0, [], False
        shown = not args.disable_tqdm
        first_row = 0 if resumed is None else resumed.queue.first_row
        self.engine = build_engine(args, trainer.accelerator.device)
        prompts = PromptStream(prompt_rows(trainer, first_row), lambda row: tokenize_prompt(trainer, row), first_row)
        self.queue = GenerationQueue(
            engine=self.engine,
            prompts=prompts,
            score=GroupFilter(
                self._scorer,
                drops_zero_variance=args.drop_zero_variance_groups,
                weights=trainer.reward_weights.tolist(),
                aggregation=args.multi_objective_aggregation,
                on_group=trainer.on_group,
            ),
            groups_per_batch=args.groups_per_take,
            num_rollouts=args.num_generations,
            max_staleness=args.staleness_bound,
            version_of_take=clock.version_of_take,
            total_takes=clock.total_takes,
            lag=args.lag,
            max_attempts=args.max_attempts,
            stall_timeout=args.stall_timeout,
            max_in_flight=groups_in_engine(args),
            max_rejected_in_a_row=args.max_rejected_groups_in_a_row or 10 * args.groups_per_batch,
            score_threads=max(1, args.reward_workers),
            score_timeout=None if isinstance(self._scorer, RewardWorkers) else args.reward_timeout,
            interrupt_score=self._scorer.close if isinstance(self._scorer, RewardWorkers) else self._scorer.interrupt,
            describe_score=self._scorer.describe,
            while_waiting=trainer._team.keep_waiting,
        )
        try:
            dtype = engine_dtype(args, model, trainer.accelerator.mixed_precision)
            spec = sent_spec(args, model, dtype)
            with told("starting the engine", shown):
                self.engine.start(spec, sampling, policy.update(version, complete=True))
            self.published_version = self.publishes_counted_from = version
            if isinstance(self._scorer, RewardWorkers):
                self._scorer.start()
            if resumed is not None:
                self.queue.restore(resumed.queue, version)
                self.publishes_counted_from = resumed.publishes_counted_from
                self.evaluation_noise = resumed.evaluation_noise or EVALUATION_NOISE
            self._delivery = None
            if args.delivery_check_steps:
                with told("checking the delivery of weights", shown):
                    self._delivery = self._check_delivery(args, prompts, version)
            self._states.published(version)
            self.queue.start(version)
        except BaseException:
            self.close()
            raise

    def publish_if_due(self, version: int) -> None:
        """Have the engine sample from the policy as `version`, unless the last publish that was due is less than
        `weight_sync_steps` older. An evaluation's is not counted: it puts off none."""
        if version - self.publishes_counted_from >= self._weight_sync_steps:
            self._publish(version)
            self.publishes_counted_from = version

    def evaluate(self, trainer, rows: list[dict[str, Any]]) -> list[Group]:
        """Sample and score an evaluation batch from the current policy, while training rollouts go on.

        Args:
            rows: the batch, each prompt repeated `num_generations_eval` times.

        Raises:
            ValueError: the batch does not hold whole groups.
        """
        version, size = trainer.state.global_step, trainer.num_generations_eval
        self._publish(version)
        chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
        if any(row["prompt"] != chunk[0]["prompt"] for chunk in chunks for row in chunk) or len(chunks[-1]) != size:
            raise ValueError(
                f"An evaluation batch of {len(rows)} rows does not hold whole groups of num_generations_eval={size}: "
                "set per_device_eval_batch_size to a multiple of it."
            )
        prompts = [Prompt(i, chunk[0], tokenize_prompt(trainer, chunk[0])) for i, chunk in enumerate(chunks)]
        sampled = self.queue.sample([p.token_ids for p in prompts], size, first_noise_key=self.evaluation_noise)
        self.evaluation_noise += len(prompts)
        groups = [Group(p, rollouts, None, version) for p, rollouts in zip(prompts, sampled, strict=True)]
        scores = self._scorer.score_all(groups, trainer._team.keep_waiting)
        for group, score in zip(groups, scores, strict=True):
            unscored = [[math.nan] * len(trainer.reward_funcs)] * size
            group.score = score if isinstance(score, Score) else Score(unscored)
        lost = [score for score in scores if isinstance(score, Rejection)]
        self._evaluated, self._evaluated_lost = self._evaluated + len(groups), [*self._evaluated_lost, *lost]
        return groups

    def end_evaluation(self) -> None:
        """Say what the evaluation's mean leaves out, once a run.

        Raises:
            RewardError: it has nothing left.
        """
        groups, self._evaluated = self._evaluated, 0
        lost, self._evaluated_lost = self._evaluated_lost, []
        if not lost:
            return
        what = f"{len(lost)} of {groups} groups of the evaluation have no reward, the last one because: "
        what += f"{lost[-1].reason}"
        if len(lost) == groups:
            raise RewardError(f"{what}. Nothing is left to take its mean over: {lost[-1].remedy}.")
        if not self._told_of_lost:
            logger.warning("%s. The evaluation's rewards are those of the others: %s.", what, lost[-1].remedy)
            self._told_of_lost = True

    @property
    def rewards_lost(self) -> dict[str, int]:
        """Groups so far whose reward worker was killed at `reward_timeout`, and whose worker died."""
        workers = self._scorer if isinstance(self._scorer, RewardWorkers) else None
        return {"timeouts": workers.timeouts if workers else 0, "crashes": workers.crashes if workers else 0}

    def measured_gaps(self) -> list[float]:
        """What the delivery checks since the last call found between engine and trainer: mean |Δ log-prob|."""
        return [] if self._delivery is None else self._delivery.measured()

    def _check_delivery(self, args: A3POConfig, prompts: PromptStream, version: int) -> DeliveryCheck | None:
        """The check, made once; `None` where there is no prompt to make it with, and so nothing to sample."""
        texts = max(NUM_TEXTS, len(args.engine_devices), len(args.vllm_server_urls or ()))  # one for each
        known = [prompt.token_ids for prompt in prompts.peek(texts)]
        if not known:
            return None
        check = DeliveryCheck(
            self.engine,
            self._policy,
            KnownTokens.after(known, args.max_completion_length),
            temperature=args.temperature,
            every=args.delivery_check_steps,
            timeout=args.stall_timeout,
        )
        check.at_start(version)
        return check

    def _publish(self, version: int) -> None:
        """Have the engine sample from the policy as `version`, if it does not yet, and check that it does when due."""
        if version == self.published_version:
            return
        self._states.published(version)
        self.queue.publish(self._policy.update(version))
        self.published_version = version
        if self._delivery is not None:
            self._delivery.after_publish(version)

    def close(self) -> None:
        """Stop everything; idempotent."""
        try:
            self.queue.close()
        finally:
            try:
                self.engine.close()
            finally:
                self._scorer.close()


def reward_functions(trainer) -> list[Callable[..., Any] | None]:
    """The trainer's reward functions, with `None` in place of a reward model, which TRL runs itself."""
    return [None if isinstance(func, nn.Module) else func for func in trainer.reward_funcs]


class PublishedStates:
    """group -> the trainer's state as its reward functions see it: the current one or, with a fixed lag, that at the
    publish of the version the group was sampled from, which no timing changes."""

    def __init__(self, trainer):
        self._trainer = trainer
        self._by_version: dict[int, TrainerState] = {}

    def __call__(self, group: Group) -> TrainerState:
        # A group saved by a run without a fixed lag has none of its own.
        return state_snapshot(self._by_version.get(group.submitted_version, self._trainer.state))

    def published(self, version: int) -> None:
        """`version` is about to be published; main thread only."""
        args = self._trainer.args
        if args.lag is not None:
            kept = {old: state for old, state in self._by_version.items() if version - old <= args.max_staleness}
            self._by_version = kept | {version: state_snapshot(self._trainer.state)}


def build_scorer(trainer, state: Callable[[Group], TrainerState]) -> RewardScorer | RewardWorkers:
    """What runs the trainer's reward functions: this process, or `reward_workers` others."""
    args, functions = trainer.args, reward_functions(trainer)
    decode = CompletionDecoder(trainer.processing_class)
    if not args.reward_workers or not any(functions):
        return RewardScorer(
            functions,
            trainer.reward_func_names,
            decode,
            state,
            timeout=args.reward_timeout,
            stall_timeout=args.stall_timeout,
        )
    return RewardWorkers(
        functions,
        trainer.reward_func_names,
        decode,
        # As a plain object: for its class, each worker would import transformers and torch.
        lambda group: SimpleNamespace(**vars(state(group))),
        workers=args.reward_workers,
        timeout=args.reward_timeout,
        on_timeout=args.reward_on_timeout,
        stall_timeout=args.stall_timeout,
    )


def take_clock(trainer) -> TakeClock:
    """When the run takes its batches, counted from its beginning, also when it goes on from a checkpoint."""
    args = trainer.args
    streams = isinstance(trainer.train_dataset, IterableDataset)
    return TakeClock(
        micro_steps_per_take=args.micro_steps_per_take,
        accumulation=args.gradient_accumulation_steps,
        micro_steps_per_epoch=None if streams else len(trainer.callback_handler.train_dataloader),
        first_version=0,
        last_version=trainer.state.max_steps,
    )


def engine_slots(args: A3POConfig) -> int:
    """Completions decoded at a time, on all devices of the engine together."""
    return args.engine_slots or min(args.generation_batch_size, MOST_SLOTS * max(1, len(args.engine_devices)))


def groups_in_engine(args: A3POConfig) -> int | None:
    """Groups handed to the engine at a time: what fills its slots and two more to refill them at once. The others are
    submitted later, under newer weights, and leave a straggler room to be overtaken. All of them where there are no
    newer weights to wait for."""
    if args.engine != "transformers" or args.lag is not None or args.schedule == "periodic":
        return None
    return -(-engine_slots(args) // args.num_generations) + 2


def build_engine(args: A3POConfig, device: torch.device) -> Engine:
    if not isinstance(args.engine, str):
        return args.engine
    if args.engine == "vllm":
        return vllm_engine(args, device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [torch.device(name) for name in args.engine_devices] or [device]
    engines = [
        TransformersEngine(
            slots=-(-engine_slots(args) // len(devices)),
            kv_on_publish=args.kv_on_publish,
            deterministic=args.deterministic,
            max_prompt_tokens=args.engine_max_prompt_tokens,
            device=on,
            threads=args.engine_threads or max(1, cores // 2 // len(devices)),
            max_restarts=args.engine_restarts,
        )
        for on in devices
    ]
    return engines[0] if len(engines) == 1 else SeveralEngines(engines)


def vllm_engine(args: A3POConfig, device: torch.device) -> VLLMEngine:
    here = sys.executable if importlib.util.find_spec("vllm") else None
    on = torch.device(args.engine_devices[0]) if args.engine_devices else device
    return VLLMEngine(
        args.vllm_server_urls or (),
        folder=Path(args.vllm_weights_dir or Path(args.output_dir) / "vllm"),
        kv_on_publish=args.kv_on_publish,
        kept_versions=args.staleness_bound + 2,
        transfer=args.vllm_weight_transfer,
        trainer_device=device,
        max_prompt_tokens=args.engine_max_prompt_tokens,
        context=args.vllm_max_model_length,
        python=args.vllm_python or here,
        device=on,
        gpu_memory=args.vllm_gpu_memory_utilization if on == device else 0.9,
        slots=args.engine_slots,
        threads=args.engine_threads,
        max_restarts=args.engine_restarts,
        # A server of its own has to load first.
        start_limit=args.vllm_server_timeout if args.vllm_server_urls else max(args.vllm_server_timeout, 600.0),
        request_limit=args.stall_timeout,
        outage_limit=args.vllm_outage_timeout,
    )


def engine_dtype(args: A3POConfig, model: nn.Module, mixed_precision: str) -> torch.dtype:
    """The engine's dtype: as set, or that of the trainer's forward."""
    if args.engine_dtype is not None:
        return getattr(torch, args.engine_dtype)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, model.dtype)


def sampling_settings(args: A3POConfig, generation_config: GenerationConfig) -> SamplingSettings:
    """What TRL would generate with, for an engine.

    Raises:
        ValueError: `generation_kwargs` holds something the engine does not do, or that has a field of its own.
    """
    unknown = sorted(set(args.generation_kwargs or {}) - GENERATION_KWARGS)
    if unknown:
        raise ValueError(
            f"generation_kwargs holds {', '.join(unknown)}, which the engine does not take from there: set what is a "
            f"field of A3POConfig there, and keep only {', '.join(sorted(GENERATION_KWARGS))} in generation_kwargs."
        )
    stop = generation_config.eos_token_id
    return SamplingSettings(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(
            token for token in ([stop] if isinstance(stop, int) else stop or ()) if token is not None
        ),
        suppress_token_ids=tuple(generation_config.suppress_tokens or ()),
        min_new_tokens=generation_config.min_new_tokens or 0,
        pad_token_id=generation_config.pad_token_id,
        seed=args.seed,
    )


def prompt_rows(trainer, first_row: int = 0) -> Iterator[dict[str, Any]]:
    """Dataset rows in GRPOTrainer's order, epoch after epoch, from number `first_row` on; an incomplete last batch of
    an epoch is left out."""
    args, dataset = trainer.args, trainer.train_dataset
    groups = args.groups_per_batch
    if isinstance(dataset, IterableDataset):
        rows = _streamed_rows(dataset.shuffle(seed=args.seed) if trainer.shuffle_dataset else dataset, groups)
        rows = itertools.islice(rows, first_row, None)
    else:
        sampler = RepeatSampler(
            data_source=dataset,
            mini_repeat_count=1,
            batch_size=groups,
            shuffle=trainer.shuffle_dataset,
            seed=args.seed,
        )
        indices = itertools.chain.from_iterable(itertools.repeat(sampler))
        rows = (dataset[index] for index in itertools.islice(indices, first_row, None))
    for row in rows:
        yield _used_columns(trainer, row)


def _streamed_rows(dataset: IterableDataset, groups: int) -> Iterator[dict[str, Any]]:
    for epoch in itertools.count():
        dataset.set_epoch(epoch)  # as the Trainer does: each epoch is shuffled anew
        whole_batches, batch = 0, []
        for row in dataset:
            batch.append(row)
            if len(batch) == groups:
                yield from batch
                whole_batches, batch = whole_batches + 1, []
        if whole_batches == 0:
            return


def _used_columns(trainer, row: dict[str, Any]) -> dict[str, Any]:
    if not trainer.args.remove_unused_columns:
        return row
    trainer._set_signature_columns_if_needed()
    return {name: value for name, value in row.items() if name in trainer._signature_columns}


def tokenize_prompt(trainer, row: dict[str, Any]) -> list[int]:
    """The prompt's tokens as TRL makes them.

    Raises:
        ValueError: the row's prompt is not one, or does not fit the model.
    """
    check_prompt(row, trainer.processing_class)
    prompt_ids, _, _ = trainer._tokenize_prompts([row["prompt"]])
    token_ids = list(prompt_ids[0])
    check_prompt_ids(token_ids, row, trainer.args, trainer.model.config.get_text_config())
    return token_ids


def state_snapshot(state: TrainerState) -> TrainerState:
    """A copy that reward functions may change without effect (the entries of `log_history` are shared)."""
    snapshot = copy.copy(state)
    snapshot.log_history = list(state.log_history)
    snapshot.stateful_callbacks = dict(state.stateful_callbacks)
    return snapshot


class CompletionDecoder:
    """Group -> completions as reward functions receive them: text, or one assistant message each.

    It works on a copy of the tokenizer, because the reward thread and the training loop decode at the same time.
    """

    def __init__(self, tokenizer):
        self._tokenizer = copy.deepcopy(tokenizer)
        self._parses = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))

    def __call__(self, group: Group) -> list[Any]:
        completion_ids = [rollout.token_ids for rollout in group.rollouts]
        if not is_conversational({"prompt": group.prompt.example["prompt"]}):
            return self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if self._parses:
            prefix = group.prompt.token_ids
            return [[parse_response(self._tokenizer, ids, prefix=prefix)] for ids in completion_ids]
        contents = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": content}] for content in contents]
