"""The trained policy of a run with ZeRO-3 or FSDP2: its weights, which are spread over the processes, are gathered for
an engine, and perturbed for the delivery check.

Guarantees: all processes gather together, when the main process calls them (`distributed/team.py`); while an engine
reads an update, no process holds more gathered weights than one bucket, which is `BUCKET_BYTES`, or a single weight if
that is larger (an embedding, for example); the trained weights are only read, except during the check at start, after
which every weight has its exact value again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from trl_a3po.distributed.team import Team
from trl_a3po.models.eval_mode import eval_mode
from trl_a3po.models.sharded import full_shape
from trl_a3po.protocol.weights import GatheredTensors, WeightUpdate
from trl_a3po.publish.changed_weights import ChangedWeights
from trl_a3po.publish.fingerprint import Fingerprint, fingerprint
from trl_a3po.publish.perturbation import PerturbationNoise
from trl_a3po.publish.weight_sources import WeightSource

BUCKET_BYTES = 256 * 2**20


class Shards(Protocol):
    """How the processes hold the weights together: `ZeroShards` or `FsdpShards`. All of them call a method at the same
    time, with the same arguments."""

    def settle(self) -> None:
        """Have the module hold its weights in parts again, where a forward has left them whole."""

    def gathered(self, sources: Mapping[str, WeightSource]) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """The weights of `sources` by name in the main process, and nothing in the others; for as long as the context
        lasts."""

    def move(self, name: str, weight: torch.Tensor, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give the parameter `name` the values that `moved` makes of its present ones, and remember these."""

    def restore(self, name: str, weight: torch.Tensor) -> None:
        """Give the parameter `name` the values that it had before `move`."""


class PartitionedPolicy:
    """The trained policy of a run whose weights are spread over the processes. Every process creates one; the main
    process calls its methods.

    Args:
        team: the processes.
        model: the trained module, unwrapped.
        shards: how the processes hold the weights.
        sources: the sources of the weights of an update, given the module.
        forward: `(input_ids, length)` -> log-probs of the last `length` tokens, by the training forward, which calls
            the module as training does, so that its hooks gather the weights of each layer.
        check_frozen: as in `ChangedWeights`.
    """

    def __init__(
        self,
        team: Team,
        model: PreTrainedModel | PeftModel,
        shards: Shards,
        sources: Callable[[Any], Mapping[str, WeightSource]],
        forward: Callable[[torch.Tensor, int], torch.Tensor],
        check_frozen: Callable[[set[str]], None] = lambda _: None,
    ):
        self._team = team
        self._model = model
        self._shards = shards
        self._sources_of = sources
        self._read_sources()
        self._changed = ChangedWeights(self._sources, check_frozen)
        self._forward = forward
        team.on_call("sources", self._read_sources)
        team.on_call("gather", self._help_gather)
        team.on_call("logps", self._logps)
        team.on_call("perturb", self._perturb)
        team.on_call("restore", self._restore)

    # --- in the main process, inside `Team.run_on_main` -----------------------------------------------------------

    def update(self, version: int, *, complete: bool = False) -> WeightUpdate:
        """Its weights as `version`, gathered bucket by bucket while an engine reads them."""
        self._team.call_others("sources")
        self._read_sources()
        names = self._changed.names(self._sources)
        chosen = {name: source for name, source in self._sources.items() if complete or name in names}
        specs = {name: _spec(source) for name, source in chosen.items()}
        sizes = {name: sum(map(_full_bytes, source.tensors)) for name, source in chosen.items()}
        return WeightUpdate(version, GatheredTensors(specs, buckets(sizes, BUCKET_BYTES), self._gathered), complete)

    def fingerprint(self) -> Fingerprint:
        self._team.call_others("sources")
        self._read_sources()
        return fingerprint(self._sources)

    def logps(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> torch.Tensor:
        """As `local_policy.probe_logps`, with the present weights; `temperature` must be that of training."""
        self._team.call_others("logps", prompts, completions)
        return self._logps(prompts, completions)

    @contextmanager
    def perturbed(self, strength: float) -> Iterator[None]:
        """Inside, its weights are those of `perturbed_weights`. A copy of the trained weights is kept in host
        memory."""
        self._team.call_others("perturb", strength)
        self._perturb(strength)
        try:
            yield
        finally:
            self._team.call_others("restore")
            self._restore()

    @contextmanager
    def _gathered(self, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        self._team.call_others("gather", names)
        with self._shards.gathered({name: self._sources[name] for name in names}) as weights:
            yield weights

    # --- in every process ---------------------------------------------------------------------------------------

    def _help_gather(self, names: Sequence[str]) -> None:
        with self._shards.gathered({name: self._sources[name] for name in names}):
            pass

    def _read_sources(self) -> None:
        """See the module as it is now: another adapter may be active, and other weights may be trained."""
        self._shards.settle()
        self._sources = self._sources_of(self._model)

    @torch.no_grad()
    def _logps(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        with eval_mode(self._model):
            return self._forward(torch.tensor(ids), len(completions[0])).float().cpu()

    @torch.no_grad()
    def _perturb(self, strength: float) -> None:
        self._shards.settle()
        noise = PerturbationNoise(self._model)
        for number, (name, weight) in enumerate(self._model.named_parameters()):
            if weight.requires_grad:
                moved = partial(noise.added_to, parameter=weight, number=number, strength=strength)
                self._shards.move(name, weight, moved)

    @torch.no_grad()
    def _restore(self) -> None:
        self._shards.settle()
        for name, weight in self._model.named_parameters():
            if weight.requires_grad:
                self._shards.restore(name, weight)


def buckets(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """The names in order, in runs of at most `max_bytes`. A weight larger than that is alone in its run."""
    runs: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        if not runs or held + size > max_bytes:
            runs.append([])
            held = 0
        runs[-1].append(name)
        held += size
    return runs


def _full_bytes(tensor: torch.Tensor) -> int:
    return full_shape(tensor).numel() * tensor.element_size()


def _spec(source: WeightSource) -> torch.Tensor:
    tensor = source.tensors[0]
    return torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")
