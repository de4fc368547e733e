"""Weights that ZeRO-3 spreads over the processes: gathered for an engine, and moved for the delivery check.

Guarantees: every gathering is done by all processes together, at the main one's call (`distributed/team.py`); while an
engine takes an update, no process holds more whole weights than one bucket, which is `BUCKET_BYTES`, or a single part
if that is larger (an embedding, say); what is trained is only read, except during the check at start, after which
every weight is again, bit for bit, what it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trl_a3po.distributed.team import Team
from trl_a3po.protocol.weights import GatheredTensors, WeightUpdate
from trl_a3po.publish.perturb import Pattern, evaluating
from trl_a3po.publish.update_parts import Part, full_shape

BUCKET_BYTES = 256 * 2**20


class PartitionedPolicy:
    """A module under ZeRO-3, as the main process's engine and delivery check see it. Made by every process.

    Args:
        team: the processes.
        model: the trained module, unwrapped.
        parts: what an update consists of.
        forward: `(input_ids, length)` -> the log-probs of the last `length` tokens, by training's own forward, which
            keeps DeepSpeed's memory of its order apart (`forward/zero_traces.py`).
    """

    def __init__(
        self,
        team: Team,
        model: nn.Module,
        parts: Mapping[str, Part],
        forward: Callable[[torch.Tensor, int], torch.Tensor],
    ):
        self._team = team
        self._model = model
        self._parts = parts
        self._forward = forward
        self._original: dict[str, torch.Tensor] = {}
        team.on_call("gather", self._help_gather)
        team.on_call("logps", self._logps)
        team.on_call("perturb", self._perturb)
        team.on_call("restore", self._restore)

    # --- by the main process, within `lead` ---------------------------------------------------------------------

    def update(self, version: int, *, complete: bool = False) -> WeightUpdate:
        """Its weights as `version`, gathered bucket by bucket while they are gone through."""
        chosen = {name: part for name, part in self._parts.items() if complete or part.changes}
        specs = {name: _spec(part) for name, part in chosen.items()}
        sizes = {name: sum(map(_whole_bytes, part.sources)) for name, part in chosen.items()}
        return WeightUpdate(version, GatheredTensors(specs, buckets(sizes, BUCKET_BYTES), self._gathered), complete)

    def logps(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
    ) -> torch.Tensor:
        """As `perturb.known_logps`, of the weights it has now; `temperature` is that of training."""
        self._team.call("logps", prompts, completions)
        return self._logps(prompts, completions)

    @contextmanager
    def perturbed(self, strength: float) -> Iterator[None]:
        """Inside, its weights are moved as `perturbed_weights` would. The main process keeps a copy of what training
        changes on its host."""
        self._team.call("perturb", strength)
        self._perturb(strength)
        try:
            yield
        finally:
            self._team.call("restore")
            self._restore()

    @contextmanager
    def _gathered(self, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        self._team.call("gather", names)
        with _whole(self._sources(names)):
            yield {name: self._parts[name].value() for name in names}

    # --- by every process ---------------------------------------------------------------------------------------

    def _help_gather(self, names: Sequence[str]) -> None:
        with _whole(self._sources(names)):
            pass

    @torch.no_grad()
    def _logps(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        with evaluating(self._model):
            return self._forward(torch.tensor(ids), len(completions[0])).float().cpu()

    @torch.no_grad()
    def _perturb(self, strength: float) -> None:
        pattern = Pattern(self._model)
        for number, (name, weight) in enumerate(self._model.named_parameters()):
            if weight.requires_grad:
                with _whole([weight], changed_by_main=True):
                    if self._team.is_main:
                        self._original[name] = weight.detach().to("cpu", copy=True)
                        weight.copy_(pattern.moved(weight.detach(), weight, number, strength))

    @torch.no_grad()
    def _restore(self) -> None:
        for name, weight in self._model.named_parameters():
            if weight.requires_grad:
                with _whole([weight], changed_by_main=True):
                    if self._team.is_main:
                        weight.copy_(self._original.pop(name))

    def _sources(self, names: Sequence[str]) -> list[torch.Tensor]:
        sources = {id(source): source for name in names for source in self._parts[name].sources}
        return list(sources.values())


def buckets(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The names in order, in runs of at most `most` bytes; a larger one is alone."""
    runs: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        if not runs or held + size > most:
            runs.append([])
            held = 0
        runs[-1].append(name)
        held += size
    return runs


def _whole(tensors: Sequence[torch.Tensor], *, changed_by_main: bool = False):
    """A context in which the partitioned ones among `tensors` are whole; what the main process changes in them reaches
    every partition."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, is_zero_param

    partitioned = [tensor for tensor in tensors if is_zero_param(tensor)]
    return GatheredParameters(partitioned, modifier_rank=0 if changed_by_main else None, enabled=bool(partitioned))


def _whole_bytes(tensor: torch.Tensor) -> int:
    return full_shape(tensor).numel() * tensor.element_size()


def _spec(part: Part) -> torch.Tensor:
    source = part.sources[0]
    return torch.empty(full_shape(source), dtype=source.dtype, device="meta")
