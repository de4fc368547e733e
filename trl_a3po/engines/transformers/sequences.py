"""What a decoder keeps of the requests it works on, and which sequences are prefilled together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trl_a3po.engines.transformers.cache import PrefillCache
from trl_a3po.protocol.engine import GroupFinished, GroupRequest, SamplingSettings
from trl_a3po.protocol.records import Rollout

# Padded tokens of one prefill forward: bounds its memory.
PREFILL_TOKENS = 8192


@dataclass(slots=True, eq=False)
class Prefilled:
    """A prompt's logits `(V,)` after its last token, its row in the cache of the forward that computed them, and how
    far the positions of the tokens that follow are ahead of their places."""

    logits: torch.Tensor
    cache: PrefillCache
    row: int
    ahead: int = 0

    def release_the_batch(self, length: int) -> None:
        """Copy what is this prompt's own, `length` tokens long, so that the rest can be freed."""
        self.logits = self.logits.clone()
        self.cache, self.row = self.cache.row(self.row, length), 0


@dataclass(slots=True, eq=False)
class DecodedGroup:
    """A request and its settings: how many of its rollouts have started, and those that are done, by number."""

    request: GroupRequest
    sampling: SamplingSettings
    started: int = 0
    prefilled: Prefilled | None = None
    done: dict[int, Rollout] = field(default_factory=dict)

    def start_next(self, kept: int = 0) -> "DecodedRollout":
        """The rollout that is next in line."""
        self.started += 1
        return DecodedRollout(self, self.next_number - 1, kept=kept)

    @property
    def next_number(self) -> int:
        """Number of the rollout that is next in line."""
        return self.request.first_rollout + self.started

    @property
    def all_started(self) -> bool:
        return self.started == self.request.num_rollouts

    @property
    def prompt(self) -> Prefilled:
        """The prefilled prompt."""
        if self.prefilled is None:
            raise RuntimeError(f"The prompt of request {self.request.request_id} was not prefilled.")
        return self.prefilled

    def release_prefill(self) -> None:
        """Free what the rollouts that have not started do not need of the prefill."""
        if self.all_started:
            self.prefilled = None
        elif self.prefilled is not None:
            self.prefilled.release_the_batch(len(self.request.prompt_ids))

    def finished(self) -> GroupFinished | None:
        """All of its rollouts, by number; `None` as long as one is missing."""
        if len(self.done) < self.request.num_rollouts:
            return None
        return GroupFinished(self.request.request_id, [self.done[i] for i in sorted(self.done)])


@dataclass(slots=True, eq=False)
class DecodedRollout:
    """A rollout that has started.

    Args:
        slot: the one it holds; `None`: its last token is drawn, or it was cancelled.
        kept: of how many tokens of its prompt the slot held the keys and values when it started.
        drawn: tokens that were drawn for it, those that the host has not read yet included.
    """

    group: DecodedGroup
    number: int
    slot: int | None = None
    kept: int = 0
    drawn: int = 0
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append(self, token: int, logp: float, version: int) -> None:
        self.token_ids.append(token)
        self.logps.append(logp)
        self.versions.append(version)


def prefill_batches(lengths: Sequence[int]) -> list[tuple[list[int], int]]:
    """Indices of the sequences to prefill together, those of similar length, and the length to pad them to."""
    batches: list[tuple[list[int], int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # longest first
        if batches:
            batch, pad_to = batches[-1]
            if 2 * lengths[i] >= pad_to and (len(batch) + 1) * pad_to <= PREFILL_TOKENS:
                batch.append(i)
                continue
        batches.append(([i], lengths[i]))
    return batches
