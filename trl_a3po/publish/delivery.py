"""The delivery check: an engine samples from the weights that were published to it, or the run ends.

Guarantees, for any engine of `protocol/engine.py`:
- at start a perturbed copy of the weights is published, and the engine's log-probs of probe tokens must move as the
  trainer's do; then the true weights are published again, and the log-probs must move back;
- later, every `every` optimizer steps, the engine must be closer to the version published last than to any version
  checked before, provided that the two versions differ by three times the gap at start;
- the gap between engine and trainer is watched (`gap_watch.py`);
- every answer names its version, which must be the one published last.

`delivery_faults.py` has the decisions and the reasons for their numbers.
"""

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from trl_a3po.errors import DeliveryError
from trl_a3po.protocol.engine import Engine
from trl_a3po.protocol.weights import WeightUpdate
from trl_a3po.publish.delivery_faults import CAUSES, StartMeasurements, distance, fault_after_publish
from trl_a3po.publish.fingerprint import Fingerprint
from trl_a3po.publish.gap_watch import GapWatch
from trl_a3po.publish.perturbation import MAX_MOVEMENT, MIN_MOVEMENT, StrengthSearch

NUM_PROBES, PROMPT_TOKENS, COMPLETION_TOKENS = 2, 8, 8
MAX_TRIALS = 10  # strengths of the perturbation to try


@dataclass(frozen=True)
class ProbeTokens:
    """Tokens whose log-probs are compared: N prompts of one length and N completions of one length, which need no
    padding as a batch."""

    prompts: list[list[int]]
    completions: list[list[int]]

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]], max_completion_length: int) -> "ProbeTokens":
        """The last tokens of `prompts`, each followed by arbitrary tokens that occur in the prompts."""
        rng, vocabulary = random.Random(0), sorted({token for prompt in prompts for token in prompt})
        kept = min(PROMPT_TOKENS, *(len(prompt) for prompt in prompts))
        length = min(COMPLETION_TOKENS, max_completion_length)
        return cls([list(prompt[-kept:]) for prompt in prompts], [rng.choices(vocabulary, k=length) for _ in prompts])


class TrainedPolicy(Protocol):
    """The trained policy as the main process uses it: `LocalPolicy` or `PartitionedPolicy`."""

    def update(self, version: int, *, complete: bool = False) -> WeightUpdate:
        """Its weights as `version`: all of them, or those that have changed since the update before."""

    def fingerprint(self) -> Fingerprint:
        """What its weights are now."""

    def logps(self, prompts: list[list[int]], completions: list[list[int]], temperature: float) -> torch.Tensor:
        """The trainer's log-probs of the completions, `(N, T)`, on the CPU."""

    def perturbed(self, strength: float) -> AbstractContextManager[None]:
        """Inside, `update` and `logps` use weights that are moved by `strength`."""


class DeliveryCheck:
    """Checks one engine through a run. Main thread only.

    Costs some five forwards over 2 short texts and two publishes at start, and two such forwards at every later check.
    Keeps the log-probs of earlier versions, not their weights.

    Args:
        engine: started with the true weights of the policy.
        policy: the policy that is trained.
        probes: the tokens to score.
        temperature: of the log-probs.
        every: optimizer steps between two later checks. While the gap is not normal, every publish is checked.
        watch: what says whether the gap is normal.
        timeout: seconds to wait for one answer of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        policy: TrainedPolicy,
        probes: ProbeTokens,
        *,
        temperature: float,
        every: int,
        timeout: float,
        watch: GapWatch,
    ):
        self._engine = engine
        self._policy = policy
        self._probes = probes
        self._temperature = temperature
        self._every = every
        self._timeout = timeout
        self._watch = watch
        self._gap_is_normal = True
        self._start_gap = 0.0
        self._trainer_logps: dict[int, torch.Tensor] = {}  # by version
        self._gaps: list[float] = []

    def at_start(self, version: int) -> StartMeasurements:
        """Check before anything is in flight; afterwards the engine holds the true weights as `version` again.

        Raises:
            DeliveryError: the engine does not follow.
        """
        true, before = self._score_by_trainer(), self._score_by_engine(version)
        perturbed, during = self._score_perturbed(version, true)
        after = self._publish_and_score(version)
        measured = StartMeasurements.of((true, perturbed), (before, during, after))
        self._raise_on(measured.fault())
        self._start_gap = measured.gap
        self._trainer_logps[version] = true
        self._note(measured.gap)
        return measured

    def after_publish(self, version: int) -> None:
        """Check if a check is due. The weights of the policy have just been published as `version`.

        Raises:
            DeliveryError: the engine samples from other weights, or the gap has not been normal for several checks.
        """
        if self._gap_is_normal and version - max(self._trainer_logps) < self._every:
            return
        current, scored = self._score_by_trainer(), self._score_by_engine(version)
        self._raise_on(fault_after_publish(scored, current, self._trainer_logps, version, self._start_gap))
        self._trainer_logps[version] = current
        self._note(distance(scored, current))

    @property
    def gap_is_normal(self) -> bool:
        """Whether the last check found no larger gap than is normal."""
        return self._gap_is_normal

    def new_gaps(self) -> list[float]:
        """The gaps between engine and trainer since the last call: mean |Δ log-prob| over the probe tokens."""
        gaps, self._gaps = self._gaps, []
        return gaps

    def _note(self, gap: float) -> None:
        self._gaps.append(gap)
        self._gap_is_normal = self._watch.see(gap)

    def _score_perturbed(self, version: int, true: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The trainer's and the engine's log-probs under weights that move the trainer's far enough from `true`."""
        search = StrengthSearch()
        for _ in range(MAX_TRIALS):
            with self._policy.perturbed(search.strength):
                perturbed = self._score_by_trainer()
                movement = distance(perturbed, true)
                if search.accepts(movement):
                    return perturbed, self._publish_and_score(version)
            search.reject(movement)
        strength = search.weaker_strength()
        if strength is None:
            raise DeliveryError(
                "No perturbation of the trained weights moves the trainer's own log-probs of the probe tokens by "
                f"{MIN_MOVEMENT} to {MAX_MOVEMENT} on average, so the delivery of weights cannot be checked: "
                f"{search}. Do the parameters that require a gradient take part in the forward? "
                "delivery_check_steps=0 switches this check off."
            )
        with self._policy.perturbed(strength):
            return self._score_by_trainer(), self._publish_and_score(version)

    def _publish_and_score(self, version: int) -> torch.Tensor:
        self._engine.publish(self._policy.update(version))
        return self._score_by_engine(version)

    def _score_by_trainer(self) -> torch.Tensor:
        return self._policy.logps(self._probes.prompts, self._probes.completions, self._temperature)

    def _score_by_engine(self, version: int) -> torch.Tensor:
        rows = []
        for prompt, completion in zip(self._probes.prompts, self._probes.completions, strict=True):
            logps, answered = self._engine.score(prompt, completion, self._timeout)
            if answered != version:
                self._raise_on(f"Version {version} was published last, but the engine answers as version {answered}.")
            if len(logps) != len(completion):
                self._raise_on(f"The engine returned {len(logps)} log-probs for {len(completion)} probe tokens.")
            rows.append(logps)
        return torch.tensor(rows, dtype=torch.float32)

    @staticmethod
    def _raise_on(fault: str | None) -> None:
        if fault is not None:
            raise DeliveryError(f"{fault} {CAUSES}")
