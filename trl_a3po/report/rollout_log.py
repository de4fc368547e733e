"""Rollouts of a run with the text, version and log-probs of each token, as JSON lines in `output_dir/rollouts.jsonl`.

Guarantees: about `kept_rollouts` rollouts of a run are kept, in whole groups and spread evenly over the run; of each,
the first `MOST_TOKENS` tokens of the completion; which groups are kept does not depend on the number of processes or
on whether the run was resumed; a rollout is written once its batch has been trained for the first time; the processes
meet only after steps of batches of which something is kept.

The file has the lines `start`, `checkpoint` and `end` of a timeline, so that
`read_timeline("outputs/run/rollouts.jsonl", "rollout")` returns the lineage of a resumed run. A line `rollout` holds:

- `version` of the policy that it was taken at, `prompt` (place in the prompt stream), `rollout` (number in its group),
  `finish_reason`, and `length`, its tokens, of which the first `MOST_TOKENS` have entries below;
- `prompt_text`, and `rewards`, by the name of the reward function; `advantage`;
- for each token: `tokens` (text), `versions` (-1 where no policy sampled it), `behavior_logps`, and, in the first
  optimizer step of its batch, `policy_logps`, `weights` (the objective's, 1 where it has none) and `entropies`.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_a3po.config import A3POConfig
from trl_a3po.distributed.team import Team
from trl_a3po.protocol.records import Group
from trl_a3po.report.timeline import Timeline
from trl_a3po.report.token_texts import TokenTexts
from trl_a3po.rollout.batch_rows import Row, images_of_row, prompt_ids_of

NAME = "rollouts.jsonl"
MOST_TOKENS = 2000  # of a completion, and of a prompt
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2  # its multiples are spread evenly between 0 and 1

Kept = dict[str, Any]


def kept_share(args: A3POConfig, max_steps: int) -> float:
    """The share of the groups of a run of `max_steps` that are kept, from 0 to 1."""
    batches = math.ceil(max_steps * args.gradient_accumulation_steps / args.micro_steps_per_generation)
    rollouts = batches * args.groups_per_batch * args.num_generations
    return min(1.0, args.kept_rollouts / max(1, rollouts))


def is_kept(prompt: int, share: float) -> bool:
    """Whether the group of the prompt with this place in the prompt stream is kept."""
    return (prompt + 1) * GOLDEN_RATIO % 1 < share


class RolloutLog:
    """The kept rollouts that this process trains.

    Args:
        tokenizer: makes the texts.
        reward_names: the names of the reward functions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reward_names: Sequence[str]):
        self.share = 0.0
        self._texts = TokenTexts(tokenizer)
        self._reward_names = list(reward_names)
        self._untrained: dict[int, Kept] = {}  # by place
        self._trained: list[Kept] = []
        self._batch_is_kept = False  # some process has rollouts of the batch to keep; the same in all processes

    def begin_run(self, share: float) -> None:
        """A run begins that keeps this share of its groups."""
        self.share, self._untrained, self._trained, self._batch_is_kept = share, {}, [], False

    def begin_take(self, groups: Sequence[Group], *, first: bool) -> None:
        """A take hands out `groups` to all processes together, as the `first` take of its generation batch or a later
        one. What has not been trained when a batch begins will not be."""
        if first:
            self._untrained, self._batch_is_kept = {}, False
        self._batch_is_kept |= any(is_kept(group.prompt.index, self.share) for group in groups)

    def taken(
        self,
        rows: Sequence[Row],
        places: Sequence[int],
        rewards: Sequence[Sequence[float]],
        batch: dict[str, Any],
        version: int,
    ) -> None:
        """TRL has prepared `rows`, which were taken at `version`.

        Args:
            places: the place of each row in the generation batch, by which `trained` knows it.
            rewards: for each row, one number for each reward function.
            batch: as TRL has prepared it: `advantages` is `(B,)` or `(B, T)`.
        """
        advantages = batch["advantages"].reshape(len(rows), -1)[:, 0].tolist()
        prompt_texts: dict[int, str] = {}  # by the identity of the prompt, which the rollouts of a group share
        for row, place, reward, advantage in zip(rows, places, rewards, advantages, strict=True):
            if is_kept(row[0].prompt.index, self.share):
                prompt = prompt_ids_of(row)
                if id(prompt) not in prompt_texts:
                    prompt_texts[id(prompt)] = self._texts.text(prompt[-MOST_TOKENS:])
                facts = {"version": version, **self._facts(row, reward, prompt_texts[id(prompt)])}
                self._untrained[place] = {**facts, "advantage": _number(advantage)}

    def trained(self, places: torch.Tensor, version: int, **per_token: torch.Tensor | None) -> None:
        """A micro-batch has been trained at `version`.

        Args:
            places: `(B,)`, as `taken` was given them.
            per_token: each `(B, T)` or `(B, 1)`, aligned with the completion; what is `None` is left out.
        """
        if not self._untrained:
            return
        given = {name: values.detach().float() for name, values in per_token.items() if values is not None}
        # In one copy, because every copy waits for the device.
        table = torch.stack(torch.broadcast_tensors(*given.values())).cpu()
        for i, place in enumerate(places.tolist()):
            kept = self._untrained.pop(place, None)
            if kept is None:
                continue
            rows = table[:, i, : len(kept["tokens"])]
            kept |= dict(zip(given, _rounded(rows), strict=True))
            self._trained.append({"trained_version": version, **kept})

    def write(self, team: Team, log: Timeline | None) -> None:
        """Append what has been trained since the last call to `log`. Every process calls this; the main one has
        `log`."""
        if not self._batch_is_kept:
            return
        trained, self._trained = self._trained, []
        every = team.gather(trained)
        if every is None or log is None:
            return
        for kept in sorted((kept for part in every for kept in part), key=lambda k: (k["prompt"], k["rollout"])):
            log.write_many_numbers("rollout", kept)
        log.flush()

    def _facts(self, row: Row, reward: Sequence[float], prompt_text: str) -> Kept:
        group, number = row
        rollout = group.rollouts[number]
        token_ids = rollout.token_ids[:MOST_TOKENS]
        return {
            "prompt": group.prompt.index,
            "rollout": number,
            "finish_reason": rollout.finish_reason,
            "length": len(rollout.token_ids),
            "prompt_length": len(prompt_ids_of(row)),
            **({} if (images := images_of_row(row)) is None else {"images": len(images.images)}),
            "prompt_text": prompt_text,
            "rewards": dict(zip(self._reward_names, map(_number, reward), strict=True)),
            "tokens": self._texts.each(token_ids),
            "versions": rollout.versions[:MOST_TOKENS],
            "behavior_logps": _rounded(torch.tensor([rollout.logps[:MOST_TOKENS]], dtype=torch.float64))[0],
        }


class RolloutLogCallback(TrainerCallback):
    """Writes what an optimizer step has trained.

    Args:
        log: of this process.
        team: the processes of the run.
        file: returns the file; `None` in all processes but the main one.
    """

    def __init__(self, log: RolloutLog, team: Team, file: Callable[[], Timeline | None]):
        self._log, self._team, self._file = log, team, file

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._log.write(self._team, self._file())


def begin_rollouts(args: A3POConfig, run: str | None, version: int, resumed: bool) -> Timeline:
    """The file of the rollouts of `run`, which starts, or is resumed, at `version`."""
    return Timeline(Path(args.output_dir or ".") / NAME, run=run, version=version, resumed=resumed)


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _rounded(rows: torch.Tensor) -> list[list[float | None]]:
    rounded: list[list[float | None]] = rows.double().round(decimals=4).tolist()
    if bool(rows.isfinite().all()):
        return rounded
    return [[value if value is not None and math.isfinite(value) else None for value in row] for row in rounded]
