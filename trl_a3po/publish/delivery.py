"""The delivery check: an engine samples from the weights that were published to it, or the run ends.

Guarantees, for any engine of `protocol/engine.py`:
- at start a perturbed copy of the weights is published, and the engine's log-probs of known tokens must move as the
  trainer's do; then the true weights are published again, and they must move back;
- later, every so many optimizer steps, the engine must be closer to the version published last than to any version
  checked before, once the two differ by three times the gap at start;
- every answer names its version, which must be the one published last.

Why movements are compared: the gap between engine and trainer depends on dtypes and kernels (1e-5 with fp32 on both
sides, up to a tenth with bf16), so no fixed number tells a good gap from a bad one. But the perturbation is made
strong enough to move log-probs by 1 to 3, far more than any of these: an engine that follows is wrong by about its own
gap, a small part of that, and one that leaves out a part of the weights, or divides by another temperature, by much
more. So the movement may be wrong by five gaps, taken as no less than 5% and no more than 20% of it, and the gap may
itself be 20% of it. With fp32 on both sides that finds one missing layer in 30, with bf16 a missing output layer.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from trl_a3po.errors import DeliveryError
from trl_a3po.protocol.engine import Engine
from trl_a3po.protocol.weights import WeightUpdate

NUM_TEXTS, PROMPT_TOKENS, COMPLETION_TOKENS = 2, 8, 8
SMALL_ERROR, LARGE_ERROR = 0.05, 0.2  # as parts of the trainer's movement
ERROR_BY_GAP = 5
DIFFERENT_BY = 3  # times the gap at start
SMALLEST_GAP = 1e-4  # what rounding alone may come to
USEFUL_MOVEMENT = 0.02  # what is used where no noise reaches LEAST_MOVEMENT
LEAST_MOVEMENT, MOST_MOVEMENT = 1.0, 3.0  # mean |Δ log-prob| of the perturbation
FIRST_STRENGTH, STRENGTHS = 0.07, 10

CAUSES = (
    "Likely causes: the adapter is not loaded, or only the weights beside it are; the publish was skipped or went to "
    "another engine; an untied copy of lm_head keeps old weights; a cache outlived the publish; a server was started "
    "with another base model; the engine divides by another temperature, filters before it takes log-probs, or "
    "computes in a dtype too coarse for this model. delivery_check_steps=0 switches this check off."
)


@dataclass(frozen=True)
class KnownTokens:
    """N prompts of one length and N completions of one length, so that a batch of them needs no padding."""

    prompts: list[list[int]]
    completions: list[list[int]]

    @classmethod
    def after(cls, prompts: Sequence[Sequence[int]], longest: int) -> "KnownTokens":
        """The ends of `prompts`, and after them at most `longest` arbitrary tokens out of the prompts."""
        choice, vocabulary = random.Random(0), sorted({token for prompt in prompts for token in prompt})
        kept = min(PROMPT_TOKENS, *(len(prompt) for prompt in prompts))
        return cls(
            [list(prompt[-kept:]) for prompt in prompts],
            [choice.choices(vocabulary, k=min(COMPLETION_TOKENS, longest)) for _ in prompts],
        )


@dataclass(frozen=True)
class Start:
    """What the check at start saw; each number is a mean over the known tokens of |Δ log-prob|.

    Args:
        trainer_moved: the trainer's log-probs under the perturbed weights against those under the true ones.
        engine_moved: the same, of the engine.
        error: the engine's movement against the trainer's, token by token.
        left: the engine's log-probs after the true weights came back against those before.
        gap: engine against trainer under the true weights, at the end.
    """

    trainer_moved: float
    engine_moved: float
    error: float
    left: float
    gap: float

    @classmethod
    def of(cls, trainer: Sequence[torch.Tensor], engine: Sequence[torch.Tensor]) -> "Start":
        """From log-probs `(N, T)`: `trainer` true and perturbed; `engine` true, perturbed, and true again."""
        (true, perturbed), (before, during, after) = trainer, engine
        return cls(
            trainer_moved=distance(perturbed, true),
            engine_moved=distance(during, before),
            error=distance(during - before, perturbed - true),
            left=distance(after, before),
            gap=distance(after, true),
        )

    def fault(self) -> str | None:
        """What is wrong, in a sentence with its numbers; `None` if nothing is. NaN is wrong."""
        large = LARGE_ERROR * self.trainer_moved
        allowed = min(large, max(SMALL_ERROR * self.trainer_moved, ERROR_BY_GAP * self.gap))
        moved = f"moved the trainer's log-probs of known tokens by {self.trainer_moved:.3g} on average"
        if not self.engine_moved >= large:
            return f"A perturbed copy of the weights {moved}, but the engine's by {self.engine_moved:.3g}."
        if not self.error <= allowed:
            return (
                f"A perturbed copy of the weights {moved} and the engine's by {self.engine_moved:.3g}, but not alike: "
                f"token by token they are {self.error:.3g} apart, more than {allowed:.3g}."
            )
        if not self.left <= allowed:
            return (
                f"A perturbed copy of the weights {moved}; after the true weights were published again, the engine's "
                f"are still {self.left:.3g} from where they were, more than {allowed:.3g}."
            )
        if not self.gap <= large:
            return (
                f"For the same weights the engine's log-probs of known tokens are {self.gap:.3g} from the trainer's "
                f"on average, more than {large:.3g}, though they move alike."
            )
        return None


def later_fault(
    engine: torch.Tensor, current: torch.Tensor, older: Mapping[int, torch.Tensor], version: int, start_gap: float
) -> str | None:
    """What is wrong with the engine's log-probs of known tokens, `(N, T)`, under `version`; `None` if nothing is.

    Args:
        current: the trainer's, under `version`.
        older: the trainer's, under earlier versions.
        start_gap: the gap between engine and trainer at start.
    """
    gap = distance(engine, current)
    if not gap < torch.inf:
        return f"The engine's log-probs of known tokens under version {version} are not finite."
    apart = {old: distance(current, logps) for old, logps in older.items()}
    others = {
        old: distance(engine, logps)
        for old, logps in older.items()
        if apart[old] > DIFFERENT_BY * max(start_gap, SMALLEST_GAP)
    }
    closest = min(others, key=others.get, default=None)
    if closest is None or gap < others[closest]:
        return None
    return (
        f"Version {version} was published, but the engine's log-probs of known tokens are closer to version "
        f"{closest}: on average {others[closest]:.3g} from its and {gap:.3g} from version {version}'s, which are "
        f"{apart[closest]:.3g} apart; the gap at start was {start_gap:.3g}."
    )


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().mean().item()


def between(too_weak: float, too_strong: float) -> float:
    """The next strength of a perturbation to try."""
    if too_weak == 0.0:
        return too_strong / 3
    return 3 * too_weak if too_strong == torch.inf else (too_weak * too_strong) ** 0.5


class Policy(Protocol):
    """The trained policy as the main process sees it: `perturb.WholePolicy`, or `partitioned.PartitionedPolicy`."""

    def update(self, version: int, *, complete: bool = False) -> WeightUpdate:
        """Its weights as `version`: all of them, or those that training changes."""

    def logps(self, prompts: list[list[int]], completions: list[list[int]], temperature: float) -> torch.Tensor:
        """The trainer's log-probs of known tokens, `(N, T)`, on the CPU."""

    def perturbed(self, strength: float) -> AbstractContextManager[None]:
        """Inside, both are those of weights moved by `strength`."""


class DeliveryCheck:
    """Checks one engine through a run. Main thread only.

    Costs some five forwards over 2 short texts and two publishes at start, and two such forwards at every later check;
    keeps log-probs of earlier versions, not their weights.

    Args:
        engine: started with the policy's true weights.
        policy: the policy that is trained.
        known: the tokens to score.
        temperature: of the log-probs.
        every: optimizer steps between two later checks.
        timeout: seconds to wait for one answer of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        known: KnownTokens,
        *,
        temperature: float,
        every: int,
        timeout: float,
    ):
        self._engine = engine
        self._policy = policy
        self._known = known
        self._temperature = temperature
        self._every = every
        self._timeout = timeout
        self._start_gap = 0.0
        self._trainer_logps: dict[int, torch.Tensor] = {}
        self._measured: list[float] = []

    def at_start(self, version: int) -> Start:
        """Check before anything is in flight; afterwards the engine holds the true weights as `version` again.

        Raises:
            DeliveryError: the engine does not follow.
        """
        true, before = self._trained(), self._scored(version)
        perturbed, during = self._perturbed(version, true)
        self._engine.publish(self._policy.update(version))
        start = Start.of((true, perturbed), (before, during, self._scored(version)))
        self._end_on(start.fault())
        self._start_gap = start.gap
        self._trainer_logps[version] = true
        self._measured.append(start.gap)
        return start

    def after_publish(self, version: int) -> None:
        """Check if it is due, with the policy's weights just published as `version`.

        Raises:
            DeliveryError: the engine samples from other weights.
        """
        if version - max(self._trainer_logps) < self._every:
            return
        current, scored = self._trained(), self._scored(version)
        self._end_on(later_fault(scored, current, self._trainer_logps, version, self._start_gap))
        self._trainer_logps[version] = current
        self._measured.append(distance(scored, current))

    def measured(self) -> list[float]:
        """The gaps between engine and trainer since the last call: mean |Δ log-prob| over the known tokens."""
        measured, self._measured = self._measured, []
        return measured

    def _perturbed(self, version: int, true: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The trainer's and the engine's log-probs under weights that move the trainer's far enough."""
        strength, too_weak, too_strong, tried = FIRST_STRENGTH, 0.0, torch.inf, []
        weaker: list[tuple[float, float]] = []
        for _ in range(STRENGTHS):
            with self._policy.perturbed(strength):
                logps = self._trained()
                moved = distance(logps, true)
                if LEAST_MOVEMENT <= moved <= MOST_MOVEMENT:
                    return logps, self._published(version)
            tried.append(f"{moved:.3g} with noise of {strength:.3g}")
            if USEFUL_MOVEMENT <= moved < LEAST_MOVEMENT:
                weaker.append((moved, strength))
            if moved < LEAST_MOVEMENT:
                too_weak = strength
            else:  # or not finite
                too_strong = strength
            strength = between(too_weak, too_strong)
        if weaker:
            # An adapter below an untrained output layer moves log-probs by a tenth at most, which is still far more
            # than the gap with fp32; the weakest noise that comes near it disturbs the forward least.
            most = max(moved for moved, _ in weaker)
            with self._policy.perturbed(min(strength for moved, strength in weaker if moved >= most / 2)):
                return self._trained(), self._published(version)
        raise DeliveryError(
            "No perturbation of the trained weights moves the trainer's own log-probs of known tokens by "
            f"{LEAST_MOVEMENT} to {MOST_MOVEMENT} on average, so the delivery of weights cannot be checked: "
            f"{', '.join(tried)}. Do the parameters that require a gradient take part in the forward? "
            "delivery_check_steps=0 switches this check off."
        )

    def _published(self, version: int) -> torch.Tensor:
        self._engine.publish(self._policy.update(version))
        return self._scored(version)

    def _trained(self) -> torch.Tensor:
        return self._policy.logps(self._known.prompts, self._known.completions, self._temperature)

    def _scored(self, version: int) -> torch.Tensor:
        rows = []
        for prompt, completion in zip(self._known.prompts, self._known.completions, strict=True):
            logps, answered = self._engine.score(prompt, completion, self._timeout)
            if answered != version:
                self._end_on(f"Version {version} was published last, but the engine answers as version {answered}.")
            if len(logps) != len(completion):
                self._end_on(f"The engine answered {len(logps)} log-probs for {len(completion)} known tokens.")
            rows.append(logps)
        return torch.tensor(rows, dtype=torch.float32)

    @staticmethod
    def _end_on(fault: str | None) -> None:
        if fault is not None:
            raise DeliveryError(f"{fault} {CAUSES}")
