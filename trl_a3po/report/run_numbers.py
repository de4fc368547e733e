"""Where the time of a run went, from the lines of its timeline: for which part of the pipeline the trainer waited, and
how busy the engine and the reward functions were.

Guarantees: pure; the start of the engine, the first take, evaluations and saving do not count. For a resumed run, the
numbers are those of the last process.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_a3po.report.run_settings import RunSettings
from trl_a3po.report.sampling_times import share_of_length, stragglers_are_long

Lines = list[dict[str, Any]]
Array = np.ndarray[Any, np.dtype[Any]]

STRAGGLER = 3.0  # times the median, from which a group's sampling or scoring is that of a straggler


@dataclass(frozen=True)
class RunNumbers:
    """What decides which part of a run limits it. Shares are from 0 to 1.

    Args:
        seconds: of the optimizer steps that were counted, and of which the next four are shares.
        training, waiting, publishing: what the trainer did.
        waiting_for_sampling, waiting_for_rewards: parts of `waiting`, by what the last group of each batch was doing.
        waiting_for_stragglers: a part of these two, in which the rest of the batch was ready and the last group took
            more than `STRAGGLER` times the median.
        slowest_phase: "sampling" or "scoring", in which the stragglers took longest.
        engine_busy: share of the time in which at least one group was in the engine.
        rewards_busy: share of the time in which the reward functions worked, over all reward workers.
        engine_fill: while the trainer waited, completions in the engine as a share of `engine_slots`; `None` if these
            are not known or the trainer did not wait.
        settings: of the run.
        stragglers_are_long: whether the length of their completions explains the stragglers; `None` if there are none
            or it is not known.
        share_of_length: share of the time of sampling that goes with the length of completions; `None` if it is not
            known.
    """

    seconds: float
    training: float
    waiting: float
    publishing: float
    waiting_for_sampling: float
    waiting_for_rewards: float
    waiting_for_stragglers: float
    slowest_phase: str
    engine_busy: float
    rewards_busy: float
    engine_fill: float | None
    settings: RunSettings
    stragglers_are_long: bool | None = None
    share_of_length: float | None = None


def run_numbers(lines: Lines, last_takes: int | None = None) -> RunNumbers | None:
    """The numbers of a run, or of its last takes; `None` until three batches have been trained.

    Args:
        lines: as `read_timeline` returns them.
        last_takes: how many takes to look at; by default all.
    """
    start, kinds = _last_process(lines)
    takes = kinds["take"] if last_takes is None else kinds["take"][-last_takes - 1 :]
    first, takes = takes[:1], takes[1:]
    steps = [step for step in kinds["step"] if takes and step["ended"] > takes[0]["began"]]
    takes = [take for take in takes if steps and take["ended"] <= steps[-1]["ended"]]
    if len(takes) < 2:
        return None
    seconds, since, until = _seconds(steps), steps[0]["began"], steps[-1]["ended"]
    groups, publishes = _Groups(kinds["group"]), [line for line in kinds["publish"] if since <= line["began"] <= until]
    waiting, publishing = _Waiting(takes, groups), _seconds(publishes)
    # What was submitted later is not known before it is taken.
    sampled = groups.submitted_for([*first, *takes])
    settings = RunSettings.of_start(start)
    return RunNumbers(
        seconds=seconds,
        training=max(0.0, seconds - waiting.seconds - publishing) / seconds,
        waiting=waiting.seconds / seconds,
        publishing=publishing / seconds,
        waiting_for_sampling=waiting.for_sampling / seconds,
        waiting_for_rewards=waiting.for_rewards / seconds,
        waiting_for_stragglers=waiting.for_stragglers / seconds,
        slowest_phase=waiting.slowest_phase,
        engine_busy=_share(_union(groups.sampling), *sampled),
        rewards_busy=min(1.0, _share(groups.scoring, *sampled) / max(1, settings.reward_workers)),
        engine_fill=_fill(groups.sampling, waiting.spans, settings),
        settings=settings,
        stragglers_are_long=stragglers_are_long(waiting.long_sampling),
        share_of_length=share_of_length(kinds["group"]),
    )


def _last_process(lines: Lines) -> tuple[dict[str, Any], dict[str, Lines]]:
    """The first line of the last process, and its other lines by kind."""
    kinds: dict[str, Lines] = {kind: [] for kind in ("take", "step", "publish", "group")}
    start: dict[str, Any] = {}
    for line in lines:
        if line["kind"] == "start":
            start, kinds = line, {kind: [] for kind in kinds}
        elif line["kind"] in kinds:
            kinds[line["kind"]].append(line)
    return start, kinds


class _Groups:
    """When the groups of a run were sampled and scored, as spans `(groups, 2)` in seconds."""

    def __init__(self, lines: Lines):
        self.trained = [line for line in lines if line["outcome"] == "trained"]
        self.sampling = _spans(lines, "submitted", "finished")
        self.scoring = _spans(lines, "scoring", "scored")
        self.usual_sampling = float(np.median(np.diff(self.sampling))) if len(self.sampling) else 0.0
        self.usual_scoring = float(np.median(np.diff(self.scoring))) if len(self.scoring) else 0.0
        longest = [max(line["lengths"]) for line in lines if line.get("lengths")]
        self.usual_length = float(np.median(longest)) if longest else 0.0

    def submitted_for(self, takes: Lines) -> tuple[float, float]:
        """When the first and when the last of the groups that these takes handed out was submitted."""
        began, ended = takes[0]["began"], takes[-1]["ended"]
        taken = [group for group in self.trained if began <= group["ended"] <= ended]
        times = _spans(taken, "submitted", "finished")[:, 0]
        return float(times.min(initial=ended)), float(times.max(initial=began))


class _Waiting:
    """For what the trainer waited in its takes, in seconds."""

    def __init__(self, takes: Lines, groups: _Groups):
        self.spans = _spans(takes, "began", "ended")
        self.seconds = float(np.diff(self.spans).sum())
        self.for_sampling = self.for_rewards = self.for_stragglers = 0.0
        self.long_sampling: list[tuple[float, float]] = []  # times the usual time and length of each straggler
        self._straggling = {"sampling": 0.0, "scoring": 0.0}
        began = self.spans[:, 0]
        batches: list[Lines] = [[] for _ in takes]
        for group in groups.trained:
            number = int(np.searchsorted(began, group["ended"], side="right")) - 1
            if number >= 0 and group["ended"] <= self.spans[number, 1] and group["scored"] is not None:
                batches[number].append(group)
        for take, batch in zip(takes, batches, strict=True):
            if batch:
                self._add(take, sorted(batch, key=lambda group: float(group["scored"])), groups)

    @property
    def slowest_phase(self) -> str:
        return max(self._straggling, key=self._straggling.__getitem__)

    def _add(self, take: dict[str, Any], batch: Lines, groups: _Groups) -> None:
        """Add the wait of one take, whose `batch` is in the order in which its groups became ready."""
        last, began = batch[-1], take["began"]
        if last["finished"] is None:  # sampled by an earlier process
            return
        self.for_sampling += max(0.0, last["finished"] - began)
        self.for_rewards += max(0.0, last["scored"] - max(began, last["finished"]))
        others_ready = max([began, *(group["scored"] for group in batch[: -max(1, len(batch) // 4)])])
        for phase, since, until, usual in (
            ("sampling", last["submitted"], last["finished"], groups.usual_sampling),
            ("scoring", last["scoring"], last["scored"], groups.usual_scoring),
        ):
            if since is not None and until - since > STRAGGLER * usual:
                seconds = max(0.0, until - max(others_ready, since))
                self.for_stragglers += seconds
                self._straggling[phase] += seconds
                if phase == "sampling" and last.get("lengths") and usual and groups.usual_length:
                    length = max(last["lengths"]) / groups.usual_length
                    self.long_sampling.append(((until - since) / usual, length))


def _spans(lines: Lines, since: str, until: str) -> Array:
    """`(lines, 2)` times between which each line lasted; a line without one of the two is left out."""
    spans = [(line[since], line[until]) for line in lines if line[since] is not None and line[until] is not None]
    return np.array(spans, dtype=float).reshape(-1, 2)


def _seconds(lines: Lines) -> float:
    return float(np.diff(_spans(lines, "began", "ended")).sum())


def _union(spans: Array) -> Array:
    """The same times as spans that do not overlap, in order."""
    spans = spans[np.argsort(spans[:, 0])]
    if not len(spans):
        return spans
    reached = np.maximum.accumulate(spans[:, 1])
    begins = np.concatenate([[True], spans[1:, 0] > reached[:-1]])
    ends = np.concatenate([begins[1:], [True]])
    return np.stack([spans[begins, 0], reached[ends]], axis=1)


def _share(spans: Array, since: float, until: float) -> float:
    """How many of `spans` cover a moment between `since` and `until`, in the mean."""
    covered = np.diff(np.clip(spans, since, max(since, until))).sum()
    return float(covered / (until - since)) if until > since else 0.0


def _fill(sampling: Array, waits: Array, settings: RunSettings) -> float | None:
    """Completions in the engine during `waits`, as a share of its slots."""
    seconds = np.diff(waits).sum()
    if settings.engine_slots is None or not seconds:
        return None
    edges = waits.reshape(-1)
    waited = np.repeat(np.cumsum(np.diff(waits)[:, 0]), 2)
    waited[::2] -= np.diff(waits)[:, 0]  # before each edge
    in_engine = np.diff(np.interp(sampling, edges, waited)).sum() / seconds
    return float(in_engine * settings.num_generations / settings.engine_slots)
