"""`Session`: the engine, the queue and the reward functions of one `train()` call, from their start to their close.

Guarantees: if a part fails to start, the parts started before it are closed; weights are published to the engine here
and nowhere else, and their delivery is checked when due.
"""

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from trl_a3po.config import A3POConfig
from trl_a3po.errors import EngineError, GenerationFailed
from trl_a3po.models.finite import ADVICE, not_finite
from trl_a3po.models.image_token import image_token_of
from trl_a3po.protocol.engine import SamplingSettings
from trl_a3po.protocol.records import Group
from trl_a3po.publish.adapter_or_merged import published_spec
from trl_a3po.publish.delivery import NUM_PROBES, DeliveryCheck, ProbeTokens, TrainedPolicy
from trl_a3po.report.logged_warnings import LoggedWarnings
from trl_a3po.report.progress import progress_line
from trl_a3po.report.rollout_log import begin_rollouts
from trl_a3po.report.run_timeline import begin_timeline, facts_of_take
from trl_a3po.report.timeline import Timeline
from trl_a3po.rewards.recorded import RecordedRewards
from trl_a3po.rollout.batch_rows import Row
from trl_a3po.rollout.prompt_stream import PromptStream
from trl_a3po.session.build_engine import build_engine, engine_dtype, known_slots, queue_rules, split_of
from trl_a3po.session.build_episodes import build_episodes
from trl_a3po.session.build_policy import policy_size
from trl_a3po.session.build_queue import build_queue
from trl_a3po.session.build_scorer import PublishedStates, build_scorer, recorded_columns
from trl_a3po.session.closing import close_after_error
from trl_a3po.session.cores import SharedCores
from trl_a3po.session.engine_gap import EngineGapOfRun
from trl_a3po.session.evaluation import FIRST_NOISE_KEY, EvaluationScores, evaluation_prompts
from trl_a3po.session.left_out_rows import LeftOutRows
from trl_a3po.session.prompt_rows import prompt_with_tokens, tokenize_or_leave_out
from trl_a3po.session.resuming import RunState, new_run
from trl_a3po.session.sampling import check_unchanged, sampling_settings
from trl_a3po.session.served_weights import ServedWeights, check_same_model
from trl_a3po.workers.running_clock import RunningClock

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer


class Session:
    """The engine, the queue and the reward functions of one `train()` call.

    Generation starts with the trainer's current weights. `close` stops it.

    Args:
        trainer: a trainer that is about to train its next micro-step.
        policy: its policy, as `build_policy` makes it.
        resumed: the run to continue, `None` for a new one.
    """

    def __init__(self, trainer: "A3POTrainer", policy: TrainedPolicy, resumed: RunState | None = None):
        args, version = trainer.args, trainer.state.global_step
        self._policy = policy
        self._termination = trainer._termination
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._current_sampling = lambda: _sampling(trainer)
        self._sampling = self._current_sampling()
        self._states = PublishedStates(trainer)
        running = RunningClock()
        self.engine = build_engine(args, trainer.accelerator.device, trainer.processing_class)
        self._episodes = build_episodes(trainer, self.engine, self._sampling)
        self._scorer = build_scorer(trainer, self._states, self._environments, running)
        self._rewards = RecordedRewards(self._scorer, recorded_columns(trainer), self._scored)
        # With a fixed lag, every batch has its own publish.
        self._weight_sync_steps = args.weight_sync_steps if args.lag is None else 1
        self._served = ServedWeights(policy.fingerprint)
        self._gap = EngineGapOfRun(args, self._model, trainer.accelerator.mixed_precision)
        self._evaluation = EvaluationScores()
        self.evaluation_noise = FIRST_NOISE_KEY
        self._delivery: DeliveryCheck | None = None
        self.run = new_run() if resumed is None else resumed.run
        self.timeline = begin_timeline(
            args,
            self.run,
            version,
            resumed=resumed is not None,
            slots=known_slots(args),
            max_steps=trainer.state.max_steps,
            rules=asdict(queue_rules(args, episodes=self._episodes is not None)),
            devices=asdict(split_of(args, trainer._team.size)),
            policy=asdict(policy_size(trainer)),
        )
        self.timeline.flush()  # who watches the run sees that it starts, which may take minutes
        keeps = trainer._rollout_log.share > 0
        self.rollouts = begin_rollouts(args, self.run, version, resumed=resumed is not None) if keeps else None
        self._warnings = LoggedWarnings(self.timeline)
        first_row = 0 if resumed is None else resumed.queue.first_row
        assert trainer._train_rows is not None, "the trainer has checked it"
        prompts = PromptStream(
            trainer._train_rows,
            partial(tokenize_or_leave_out, trainer),
            first_row,
            with_tokens=partial(prompt_with_tokens, trainer),
            row_left_out=LeftOutRows(trainer._train_rows, self.timeline).add,
        )
        self._prompts = prompts
        self.queue = build_queue(
            trainer,
            self.engine,
            prompts,
            self._scorer,
            self.timeline,
            lambda: self._while_waiting(trainer),
            self._episodes,
            self._rewards,
            running,
        )
        self._cores = SharedCores(args, trainer.accelerator.device)
        try:
            self._start_engine(trainer, version)
            self.published_version = self.publishes_counted_from = version
            self._scorer.start()
            if resumed is not None:
                self.queue.restore(resumed.queue, version)
                self.publishes_counted_from = resumed.publishes_counted_from
                self.evaluation_noise = resumed.evaluation_noise or FIRST_NOISE_KEY
            if args.delivery_check_steps:
                with progress_line("checking the delivery of weights", not args.disable_tqdm):
                    self._delivery = self._check_delivery(args, prompts, version)
            self._states.published(version)
            self.queue.start(version)
        except BaseException:
            close_after_error(self.close)
            raise

    def publish_if_due(self, version: int) -> None:
        """Publish the policy as `version`, unless fewer than `weight_sync_steps` have passed since the last publish
        that was due. The publish of an evaluation does not count, so it delays no other publish."""
        if version - self.publishes_counted_from >= self._weight_sync_steps:
            self._publish(version)
            self.publishes_counted_from = version

    def see_gaps(self, gaps: Sequence[tuple[float, int]]) -> None:
        """Check the gap between engine and trainer in the batch that has just been trained.

        Args:
            gaps: for each process, the sum of |Δ log-prob| over the tokens that can be compared, and their number.

        Raises:
            DeliveryError: the gap has not been normal for several batches in a row.
        """
        self._gap.see(gaps)

    def end_evaluations(self, version: int) -> None:
        """Before training goes on: publish the policy once more if evaluations have left other weights in the engine,
        such as averaged ones, and have every rollout that was sampled from those sampled again."""
        since = self._served.end_evaluations()
        if self._served.differ:
            self._publish(version)
        if since is not None:
            self.queue.sample_again(since)

    def take(self, version: int) -> list[Group]:
        """The next groups, to be trained at policy version `version`. It raises what the queue's `take` raises, or
        `EngineError` where nothing can be sampled because weights are not finite."""
        check_unchanged(self._sampling, self._current_sampling())
        found, began = self.queue.status(), self.timeline.now()
        try:
            with self._termination.may_interrupt():
                groups = self.queue.take(version)
        except GenerationFailed as error:
            if (name := not_finite(self._model)) is None:
                raise
            raise EngineError(
                f"Nothing can be sampled, because weights of the policy are not finite any more ({name!r}): a loss or "
                f"a gradient was NaN or infinite. Resume from the newest checkpoint, {ADVICE}."
            ) from error
        facts = facts_of_take(found, self.queue.status(), self.engine.stats())
        self.timeline.lasted("take", began, version=version, **facts)
        return groups

    def evaluate(self, trainer: "A3POTrainer", rows: list[dict[str, Any]]) -> list[Group]:
        """Sample and score an evaluation batch from the policy as it is now, while the rollouts of training continue.

        Args:
            trainer: the trainer.
            rows: the rows of the batch, each repeated `num_generations_eval` times.

        Raises:
            ValueError: the batch does not hold whole groups, or `trainer.model` is another model.
        """
        check_unchanged(self._sampling, self._current_sampling())
        check_same_model(self._model, trainer.accelerator.unwrap_model(trainer.model))
        version, size = trainer.state.global_step, trainer.num_generations_eval
        self._publish(version, for_evaluation=True)
        prompts = evaluation_prompts(trainer, rows)
        with self.timeline.span("evaluation", version=version, groups=len(prompts)):
            with self._termination.may_interrupt():
                sampled = self.queue.sample(
                    [prompt.token_ids for prompt in prompts],
                    size,
                    first_noise_key=self.evaluation_noise,
                    rows=None if self._episodes is None else [prompt.example for prompt in prompts],
                    images=[prompt.images for prompt in prompts],
                )
            self.evaluation_noise += len(prompts)
            groups = [Group(p, rollouts, None, version) for p, rollouts in zip(prompts, sampled, strict=True)]
            scores = self._scorer.score_all(groups, trainer._team.send_heartbeat)
            scores = self._rewards.completed_all(groups, scores)
        self._evaluation.fill_in(groups, scores, len(trainer.reward_funcs))
        return groups

    def end_evaluation(self) -> None:
        """End an evaluation. Warn, once per run, if its mean leaves groups out.

        Raises:
            RewardError: no group has a reward.
        """
        self._evaluation.end()

    @property
    def logs(self) -> list[Timeline]:
        """The files that are written line by line."""
        return [self.timeline] if self.rollouts is None else [self.timeline, self.rollouts]

    @property
    def reward_worker_failures(self) -> dict[str, int]:
        """How many groups so far had their reward worker killed at `reward_timeout` ("timeouts"), and how many had
        their worker die ("crashes")."""
        return {"timeouts": self._scorer.timeouts, "crashes": self._scorer.crashes}

    @property
    def rows_left_out(self) -> int:
        """How many rows of the data the run has left out so far."""
        return self._prompts.left_out.total()

    def measured_gaps(self) -> list[float]:
        """The mean |Δ log-prob| between engine and trainer that each delivery check since the last call has found."""
        return [] if self._delivery is None else self._delivery.new_gaps()

    def close(self) -> None:
        """Stop everything; idempotent."""
        with contextlib.ExitStack() as closing:  # the last one first, and every one of them
            for log in self.logs:
                closing.callback(log.close)
            closing.callback(self._warnings.close)
            closing.callback(self._scorer.close)
            closing.callback(self._cores.restore)
            closing.callback(self.engine.close)
            if self._episodes is not None:
                closing.callback(self._episodes.runner.close)
            closing.callback(self.queue.close)

    def environments_of(self, rows: Sequence[Row]) -> list[Any] | None:
        """The environments in which the rows of a batch were played; `None` if there are none."""
        if self._episodes is None or self._episodes.tools is None:
            return None
        return self._episodes.taken(rows)

    def _environments(self, group: Group) -> list[Any] | None:
        return None if self._episodes is None else self._episodes.environments(group)

    def _scored(self, group: Group) -> None:
        if self._episodes is not None:
            self._episodes.scored(group)

    def _start_engine(self, trainer: "A3POTrainer", version: int) -> None:
        args, model = trainer.args, self._model
        spec = published_spec(args, model, engine_dtype(args, model, trainer.accelerator.mixed_precision))
        with (
            progress_line("starting the engine", not args.disable_tqdm),
            self.timeline.span("engine_start", version=version),
        ):
            self.engine.start(spec, self._sampling, self._policy.update(version, complete=True))
        self._served.published(time.monotonic(), for_evaluation=False)

    def _check_delivery(self, args: A3POConfig, prompts: PromptStream, version: int) -> DeliveryCheck | None:
        """The delivery check, after its first run; `None` if there is no prompt, and so nothing to sample."""
        probes = max(NUM_PROBES, len(args.engine_devices), len(args.vllm_server_urls or ()))  # one for each engine
        images = image_token_of(self._model.config)  # of probes, which show none
        peeked = prompts.peek(min(probes, args.groups_per_batch))
        first = [[token for token in prompt.token_ids if token != images] for prompt in peeked]
        if not first:
            return None
        prompt_ids = list(itertools.islice(itertools.cycle(first), probes))
        check = DeliveryCheck(
            self.engine,
            self._policy,
            ProbeTokens.of_prompts(prompt_ids, args.max_completion_length),
            temperature=args.temperature,
            every=args.delivery_check_steps,
            timeout=args.stall_timeout,
            watch=self._gap.of_probes,
        )
        check.at_start(version)
        return check

    def _while_waiting(self, trainer: "A3POTrainer") -> None:
        """Called repeatedly on the main thread while it waits for rollouts."""
        self._termination.raise_if_requested()
        trainer._team.send_heartbeat()
        # The engine needs the weights of the published version, which the trainer has only until its next step.
        if self.published_version == trainer.state.global_step and self.engine.stats().awaits_publish:
            self.engine.publish(self._policy.update(self.published_version))

    def _publish(self, version: int, *, for_evaluation: bool = False) -> None:
        """Publish the policy as `version`, unless the engine has these weights already, and check its delivery if that
        is due."""
        if version == self.published_version and not self._served.differ:
            return
        self._states.published(version)
        began = time.monotonic()
        with self.timeline.span("publish", version=version):
            self.queue.publish(self._policy.update(version, complete=self._gap.asks_for_all_weights()))
        self.published_version = version
        self._served.published(began, for_evaluation=for_evaluation)
        if self._delivery is not None:
            self._delivery.after_publish(version)
            self._gap.probed(self._delivery.gap_is_normal)


def _sampling(trainer: "A3POTrainer") -> SamplingSettings:
    """The sampling settings of the trainer as it is now."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return sampling_settings(trainer.args, trainer.generation_config, model)
