"""The queue of a run, built from the trainer's settings, the times of its takes, and its filter of groups."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from datasets import IterableDataset

from trl_a3po.checks.data import room_for_completion
from trl_a3po.protocol.engine import Engine
from trl_a3po.report.timeline import Timeline
from trl_a3po.rewards.recorded import RecordedRewards
from trl_a3po.rewards.scorer import RewardScorer
from trl_a3po.rewards.worker_pool import RewardWorkers
from trl_a3po.rollout.group_filter import GroupFilter
from trl_a3po.rollout.prompt_stream import PromptStream
from trl_a3po.rollout.queue import GenerationQueue
from trl_a3po.rollout.take_clock import TakeClock
from trl_a3po.session.build_engine import queue_rules
from trl_a3po.session.build_episodes import Episodes
from trl_a3po.workers.running_clock import RunningClock

if TYPE_CHECKING:
    from trl_a3po.trainer import A3POTrainer


def build_queue(
    trainer: "A3POTrainer",
    engine: Engine,
    prompts: PromptStream,
    scorer: RewardScorer | RewardWorkers,
    timeline: Timeline,
    while_waiting: Callable[[], None],
    episodes: Episodes | None = None,
    rewards: RecordedRewards | None = None,
    running: RunningClock | None = None,
) -> GenerationQueue:
    """The queue between `engine` and the trainer's takes. The engine and the scorer may be started later.

    Args:
        episodes: what plays the rollouts of the run, between the queue and the engine; `None` if each has one turn.
        rewards: the scorer, with the rewards that episodes give themselves.
        running: the clock of the limits, which the scorer shares.
    """
    args, clock = trainer.args, take_clock(trainer)
    in_processes = isinstance(scorer, RewardWorkers)  # these apply reward_timeout themselves
    return GenerationQueue(
        engine=engine if episodes is None else episodes.runner,
        prompts=prompts,
        score=GroupFilter(
            rewards or scorer,
            drops_zero_variance=args.drop_zero_variance_groups,
            weights=lambda: trainer.reward_weights.tolist(),
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
        max_tokens=args.max_completion_length,
        max_in_flight=queue_rules(args, episodes=episodes is not None).max_in_flight,
        max_rejected_in_a_row=args.max_rejected_groups_in_a_row or 10 * args.groups_per_batch,
        replaces_groups=args.drop_zero_variance_groups or trainer.on_group is not None,
        score_threads=max(1, args.reward_workers),
        score_timeout=None if in_processes else args.reward_timeout,
        scoring_seconds=None if isinstance(scorer, RewardWorkers) else scorer.seconds,
        interrupt_score=scorer.close if isinstance(scorer, RewardWorkers) else scorer.interrupt,
        attempt_ended=timeline.attempt,
        describe_score=scorer.describe,
        while_waiting=while_waiting,
        runs_episodes=episodes is not None,
        describe_engine=(lambda: "") if episodes is None else episodes.runner.describe,
        stopped_scoring=scorer.stopped,
        scoring_starts=scorer.starting,
        running=running,
        new_tokens=partial(room_for_completion, args, trainer.model.config.get_text_config()),
    )


def take_clock(trainer: "A3POTrainer") -> TakeClock:
    """When the run takes its batches, counted from the beginning of the run, also if it was resumed."""
    args = trainer.args
    streams, loader = isinstance(trainer.train_dataset, IterableDataset), trainer.callback_handler.train_dataloader
    assert loader is not None, "the Trainer has made its dataloader before the first batch is taken"
    return TakeClock(
        micro_steps_per_take=args.micro_steps_per_take,
        accumulation=args.gradient_accumulation_steps,
        micro_steps_per_epoch=None if streams else len(loader),
        first_version=0,
        last_version=trainer.state.max_steps,
    )
