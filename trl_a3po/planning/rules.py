"""What the settings of a run fix about its batches, its queue and its takes, as plain numbers.

Guarantees: the numbers are those that the run's queue is built from. The first line of a timeline holds them, so the
forecast of a finished run follows the rules of that run.
"""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from trl_a3po.config import A3POConfig


@dataclass(frozen=True, slots=True)
class Rules:
    """
    Args:
        groups_per_take: B, the groups that one take hands out.
        num_generations: G, the completions of a group.
        max_staleness: the bound on staleness in optimizer steps, as the schedule applies it.
        weight_sync_steps: optimizer steps between two publishes.
        micro_steps_per_take: micro-steps for which a take is used.
        micro_steps_per_step: micro-steps per optimizer step (`gradient_accumulation_steps`).
        takes_per_generation: takes that hand out a generation batch.
        num_iterations: how often a completion is trained on.
        lag: of `schedule="fixed_lag"`, `None` otherwise.
        max_in_flight: groups in the engines at a time; `None` sets no limit.
        reward_workers: groups that are scored at the same time.
        schedule, engine: their names.
    """

    groups_per_take: int
    num_generations: int
    max_staleness: int
    weight_sync_steps: int = 1
    micro_steps_per_take: int = 1
    micro_steps_per_step: int = 1
    takes_per_generation: int = 1
    num_iterations: int = 1
    lag: int | None = None
    max_in_flight: int | None = None
    reward_workers: int = 1
    schedule: str = "async"
    engine: str = "transformers"

    @classmethod
    def of_config(cls, args: "A3POConfig", max_in_flight: int | None) -> Self:
        """The rules of a configuration.

        Args:
            max_in_flight: as `groups_in_engine` of `session.build_engine` has it.
        """
        return cls(
            groups_per_take=args.groups_per_take,
            num_generations=args.num_generations,
            max_staleness=args.staleness_bound,
            # With a fixed lag, every batch has its own publish.
            weight_sync_steps=args.weight_sync_steps if args.lag is None else 1,
            micro_steps_per_take=args.micro_steps_per_take,
            micro_steps_per_step=args.gradient_accumulation_steps,
            takes_per_generation=args.takes_per_generation,
            num_iterations=args.num_iterations,
            lag=args.lag,
            max_in_flight=max_in_flight,
            reward_workers=max(1, args.reward_workers),
            schedule=args.schedule,
            engine=args.engine if isinstance(args.engine, str) else type(args.engine).__name__,
        )

    @classmethod
    def of_start(cls, start: dict[str, Any]) -> Self:
        """The rules that the first line of a timeline holds.

        Raises:
            ValueError: the run was made before timelines held them.
        """
        rules = start.get("rules")
        if not isinstance(rules, dict) or set(rules) != {f.name for f in fields(cls)}:
            raise ValueError(
                "The timeline does not hold the rules of its run, because an earlier version wrote it: plan from a "
                "recipe (--config) and give the rates."
            )
        return cls(**rules)

    @property
    def steps_per_take(self) -> float:
        """Optimizer steps from one take to the next; less than 1 if several takes share a step."""
        return self.micro_steps_per_take / self.micro_steps_per_step

    @property
    def takes_in_cycle(self) -> int:
        """Takes after which a generation batch and an optimizer step end together again."""
        generation = self.micro_steps_per_take * self.takes_per_generation
        return math.lcm(generation, self.micro_steps_per_step) // self.micro_steps_per_take

    @property
    def takes_in_bound(self) -> int:
        """Takes for which groups may be outstanding right after a publish (`TakePlan.capacity`)."""
        return math.ceil((self.max_staleness + 1) / self.steps_per_take)

    @property
    def completions_per_take(self) -> int:
        return self.groups_per_take * self.num_generations


def groups_that_fill(slots: int, num_generations: int) -> int:
    """Groups that keep the slots of the `transformers` engine in use: as many as fill them, and two more to refill
    them at once."""
    return -(-slots // num_generations) + 2
