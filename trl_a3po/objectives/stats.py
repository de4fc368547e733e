"""What is logged about an objective, in a form that can be added up: over micro-batches, and over ranks.

Guarantees: `a + b` is what one pass over both batches would give; the values per staleness add up to the whole; only
`metrics` waits for the device, besides one look at the largest staleness.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch.nn.functional import pad

# Entries that are reduced at once: as many as fit into the cache of a core, and 64 MiB on a GPU.
MOST_ENTRIES_ON_CPU, MOST_ENTRIES = 2**15, 2**23


@dataclass(frozen=True)
class Tally:
    """Count, sum, sum of squares, minimum and maximum of Q quantities, one column per staleness value `0..S-1`.

    Args:
        names: the Q quantities.
        count: `(S,)` entries seen.
        sums, squares, minima, maxima: `(Q, S)`.
        by_staleness: the columns are staleness values; otherwise there is one column for everything.
    """

    names: tuple[str, ...]
    count: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor
    minima: torch.Tensor
    maxima: torch.Tensor
    by_staleness: bool

    _known: ClassVar[frozenset[str] | None] = None  # the quantities that `_summary` reads; `None`: any

    @classmethod
    @torch.no_grad()
    def of(cls, values: dict[str, torch.Tensor], mask: torch.Tensor, staleness: torch.Tensor | None = None) -> Self:
        """Tally the entries of `values` that the boolean `mask` keeps; all tensors have the mask's shape.

        Raises:
            ValueError: a quantity that this class does not log.
        """
        if cls._known is not None and (unknown := values.keys() - cls._known):
            raise ValueError(
                f"{cls.__name__} does not log {', '.join(sorted(unknown))}: the quantities that it logs are "
                f"{', '.join(sorted(cls._known))}."
            )
        # Sums over a long run of tokens need more than fp32, which is all that MPS has.
        dtype = torch.float32 if mask.device.type == "mps" else torch.float64
        table = torch.stack([value.detach() for value in values.values()]).to(dtype).flatten(1)
        columns = mask[None] if staleness is None else _staleness_columns(staleness, mask)
        columns = columns.flatten(1)
        most = MOST_ENTRIES_ON_CPU if table.device.type == "cpu" else MOST_ENTRIES
        at_once = max(1, most // max(1, table.numel()))
        reduced = [_reduced(table, some) for some in columns.split(at_once)]
        sums, squares, minima, maxima = (torch.cat(parts, dim=1) for parts in zip(*reduced, strict=True))
        return cls(
            names=tuple(values),
            count=columns.sum(1).to(dtype),
            sums=sums,
            squares=squares,
            minima=minima,
            maxima=maxima,
            by_staleness=staleness is not None,
        )

    def __add__(self, other: Self) -> Self:
        """The tally of both batches. Raises `ValueError` when they hold different quantities."""
        if (type(self), self.names, self.by_staleness) != (type(other), other.names, other.by_staleness):
            raise ValueError(
                f"Statistics of {self.names} (by_staleness={self.by_staleness}) and of {other.names} "
                f"(by_staleness={other.by_staleness}) cannot be added: add those of one objective with one setting."
            )
        size = max(len(self.count), len(other.count))
        mine, theirs = self._padded(size), other._padded(size)
        return replace(
            self,
            count=mine.count + theirs.count,
            sums=mine.sums + theirs.sums,
            squares=mine.squares + theirs.squares,
            minima=torch.minimum(mine.minima, theirs.minima),
            maxima=torch.maximum(mine.maxima, theirs.maxima),
        )

    def cpu(self) -> Self:
        """The same tally in host memory, ready to be gathered as an object from every rank and added up."""
        return self._each(torch.Tensor.cpu)

    def metrics(self) -> dict[str, float]:
        """Name -> number, all starting with `a3po/`; `a3po/d2/…` are the entries of staleness 2 alone.

        What was never seen has no key: an empty tally gives `{}`.
        """
        split = self.cpu()
        count = split.count.tolist()
        total = sum(count)
        if total == 0:
            return {}
        metrics = {f"a3po/{key}": value for key, value in split._whole()._summary(0).items()}
        if self.by_staleness:
            seen = [d for d, entries in enumerate(count) if entries > 0]
            metrics["a3po/staleness/mean"] = sum(d * count[d] for d in seen) / total
            metrics["a3po/staleness/min"] = float(seen[0])
            metrics["a3po/staleness/max"] = float(seen[-1])
            for d in seen:
                metrics[f"a3po/d{d}/fraction"] = count[d] / total
                metrics |= {f"a3po/d{d}/{key}": value for key, value in split._summary(d).items()}
        return metrics

    def _summary(self, column: int) -> dict[str, float]:
        """The numbers of one column that holds entries."""
        raise NotImplementedError

    def _column(self, column: int) -> "_Column":
        table = torch.stack(
            [self.sums[:, column], self.squares[:, column], self.minima[:, column], self.maxima[:, column]]
        )
        sums, squares, minima, maxima = (dict(zip(self.names, row, strict=True)) for row in table.tolist())
        return _Column(self.count[column].item(), sums, squares, minima, maxima)

    def _whole(self) -> Self:
        return replace(
            self._each(lambda tensor: tensor.sum(-1, keepdim=True)),
            minima=self.minima.amin(-1, keepdim=True),
            maxima=self.maxima.amax(-1, keepdim=True),
        )

    def _padded(self, size: int) -> Self:
        if size == len(self.count):
            return self
        missing = (0, size - len(self.count))
        return replace(
            self._each(lambda tensor: pad(tensor, missing)),
            minima=pad(self.minima, missing, value=torch.inf),
            maxima=pad(self.maxima, missing, value=-torch.inf),
        )

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(
            self,
            count=function(self.count),
            sums=function(self.sums),
            squares=function(self.squares),
            minima=function(self.minima),
            maxima=function(self.maxima),
        )


class DecoupledStats(Tally):
    """Per token: `w` before its cap, `r`, `ρ`, the interpolation weight, and how often clip and cap were active.

    At sequence level the first three are the row's geometric means, counted once per token.

    `ess` is the effective sample size of `ρ` as a fraction of the tokens, `(Σρ)²/(n·Σρ²)`: 1 when the policy is still
    the behavior policy, whatever the proximal method and the cap, and 0 when every `ρ` vanished. `clip/low` counts
    `r < 1 - ε_low` where `A < 0` and `clip/high` counts `r > 1 + ε_high` where `A > 0`: the tokens whose gradient the
    clip removes.

    `of` takes any of these quantities, each `(B, T)`: `w` (before its bound), `r`, `rho`, `interpolation_weight`, and
    the booleans `clip_low`, `clip_high` and `capped` (the bound has changed `w`).
    """

    _known: ClassVar[frozenset[str] | None] = frozenset(
        {"w", "r", "rho", "interpolation_weight", "clip_low", "clip_high", "capped"}
    )

    @classmethod
    def unclipped(
        cls,
        rho: torch.Tensor,
        mask: torch.Tensor,
        staleness: torch.Tensor,
        *,
        weight: torch.Tensor,
        capped: torch.Tensor,
    ) -> Self:
        """The statistics of an objective that anchors on the current policy, so that `r = 1` and no token is clipped.

        Args:
            rho: `ρ`, `(B, T)`.
            mask: `(B, T)`, true where a token counts.
            staleness: `(B, T)` integers.
            weight: the weight before its bound, `(B, T)`.
            capped: `(B, T)`, true where the bound has changed the weight.
        """
        never = torch.zeros_like(mask)
        values = {"w": weight, "r": torch.ones_like(rho), "rho": rho, "clip_low": never, "clip_high": never}
        return cls.of({**values, "capped": capped}, mask, staleness)

    def _summary(self, column: int) -> dict[str, float]:
        entries = self._column(column)
        metrics: dict[str, float] = {}
        for name in ("w", "r", "rho"):
            if name in self.names:
                metrics |= entries.spread(name)
        if "rho" in self.names:
            total, square = entries.sums["rho"], entries.squares["rho"]
            metrics["ess"] = total * total / (entries.count * square) if square > 0 else 0.0
        for name, key in (
            ("clip_low", "clip/low"),
            ("clip_high", "clip/high"),
            ("capped", "w/capped"),
            ("interpolation_weight", "interpolation_weight/mean"),
        ):
            if name in self.names:
                metrics[key] = entries.mean(name)
        return metrics


class ScaleStats(Tally):
    """Per row: the scale `S` (mean NLL of a token), and how it weighs on rows of positive and of negative advantage.

    The staleness of a row is that of its oldest token. `scale/positive` and `scale/negative` are means of `S` over the
    rows of each sign, weighted by `|A|` (`S_P` and `S_N`, arXiv 2606.03070v1, theorem 3); `imbalance` is the mean of
    `A·S`, the value of the loss without any correction: far from 0, the rows of one sign dominate. `floor` is the
    fraction of rows whose scale was below `min_scale`; `coefficient` is `C_g`.

    `of` takes these quantities, each `(B,)`: `scale`, `coefficient`, `positive` and `negative` (`S·max(A, 0)` and
    `S·max(-A, 0)`), `positive_advantage` and `negative_advantage` (`max(A, 0)` and `max(-A, 0)`), and, where
    there is a floor, `floor`.
    """

    _known: ClassVar[frozenset[str] | None] = frozenset(
        {"scale", "coefficient", "positive", "negative", "positive_advantage", "negative_advantage", "floor"}
    )

    def _summary(self, column: int) -> dict[str, float]:
        entries = self._column(column)
        metrics = entries.spread("scale") | entries.spread("coefficient")
        metrics["imbalance"] = entries.mean("positive") - entries.mean("negative")
        for sign in ("positive", "negative"):
            advantage = entries.sums[f"{sign}_advantage"]
            if advantage > 0:
                metrics[f"scale/{sign}"] = entries.sums[sign] / advantage
        if "floor" in self.names:
            metrics["floor"] = entries.mean("floor")
        return metrics


class EntropyStats(Tally):
    """Per token: the entropy of the policy in training, in nats. Everything else by staleness is the objective's."""

    _known: ClassVar[frozenset[str] | None] = frozenset({"entropy"})

    def metrics(self) -> dict[str, float]:
        return {name: value for name, value in super().metrics().items() if name.endswith("/entropy")}

    def _summary(self, column: int) -> dict[str, float]:
        return {"entropy": self._column(column).mean("entropy")}


@dataclass(frozen=True)
class _Column:
    count: float
    sums: dict[str, float]
    squares: dict[str, float]
    minima: dict[str, float]
    maxima: dict[str, float]

    def mean(self, name: str) -> float:
        return self.sums[name] / self.count

    def spread(self, name: str) -> dict[str, float]:
        return {f"{name}/mean": self.mean(name), f"{name}/min": self.minima[name], f"{name}/max": self.maxima[name]}


def _staleness_columns(staleness: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One mask per staleness value, 0 to the largest, in the first dimension."""
    largest = int(torch.where(mask, staleness, 0).max())
    values = torch.arange(largest + 1, dtype=staleness.dtype, device=staleness.device)
    return mask & (staleness == values.view(-1, *[1] * mask.dim()))


def _reduced(table: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums, sums of squares, minima and maxima, each `(Q, S)`, of the values `(Q, N)` in each of the masks `(S, N)`.

    All masks in one operation: on a GPU, starting an operation takes longer than these take."""
    table = table[:, None]
    inside = torch.where(columns, table, 0)
    least, most = torch.where(columns, table, torch.inf), torch.where(columns, table, -torch.inf)
    return inside.sum(-1), inside.square().sum(-1), least.amin(-1), most.amax(-1)
