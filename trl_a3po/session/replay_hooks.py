"""`ReplayHooks`: the hooks of `A3POTrainer` through which TRL prepares a batch that was sampled and scored already.

Guarantees: TRL is given the tokens, images, turns and rewards of the groups that were taken, so that its masks,
advantages and metrics are those of its own loop on the same completions. Nothing is sampled, tokenised or scored
twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trl_a3po.checks.arguments import check_outside_training
from trl_a3po.checks.images import check_prepared_images
from trl_a3po.checks.overrides import check_first_preparation, check_preparation, check_prepared
from trl_a3po.models.input_hooks import one_input_hook
from trl_a3po.objectives import token_staleness
from trl_a3po.report.completions_table import completion_columns
from trl_a3po.report.rollout_log import RolloutLog
from trl_a3po.rewards.thread import RewardThread
from trl_a3po.rollout.batch_rows import (
    behavior_logps,
    behavior_versions,
    messages_of,
    prompt_ids_of,
    replay_logs,
    replayed_rewards,
    replayed_rollouts,
    replayed_turns,
    rollouts_of,
)
from trl_a3po.session.build_scorer import scoring_outside_training
from trl_a3po.session.checkpoint_hooks import CheckpointHooks
from trl_a3po.session.current_batch import CurrentBatch
from trl_a3po.session.replayed_images import (
    counted_by_row,
    images_of,
    later_pictures_of,
    pictures_of,
    replayed_images,
    rows_for_trl,
)
from trl_a3po.session.temporarily import temporarily


class ReplayHooks(CheckpointHooks):
    """A part of `A3POTrainer`, which sets the attributes that are declared here."""

    log_completions: bool
    num_iterations: int
    _current_batch: CurrentBatch
    _in_step: bool
    _reward_thread: RewardThread
    _rollout_log: RolloutLog

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        rows = self._current_batch.rows
        if rows is None:
            return super()._tokenize_prompts(prompts)
        # Not tokenised again: a chat template with today's date gives other tokens after midnight.
        return [list(prompt_ids_of(row)) for row in rows], pictures_of(self._current_batch), {}

    def _generate(self, prompts: list[Any]) -> Any:
        rows = None if self.rollout is None else self._current_batch.rows
        if rows is None:
            return super()._generate(prompts)

        def replayed(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            self._current_batch.sampled = True
            return replayed_rollouts(rows)

        with temporarily(self, rollout_func=replayed, tools=[]):
            prompt_ids, completion_ids, mask, _, logps, extra, _, _ = super()._generate(prompts)
        pictures, later = pictures_of(self._current_batch), later_pictures_of(rows)
        if pictures is not None:
            pictures = [[*(one or ()), *more] or None for one, more in zip(pictures, later, strict=True)]
        return prompt_ids, completion_ids, mask, messages_of(rows), logps, extra, pictures, later

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._current_batch.rows
        return super()._tool_call_loop(*args, **kwargs) if rows is None else replayed_turns(rows)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        rows = self._current_batch.rows
        if rows is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self._current_batch.sampled = True
        if [list(ids) for ids in prompt_ids] != [prompt_ids_of(row) for row in rows]:
            raise RuntimeError(
                "The tokens of the batch's prompts are not those that were submitted to the engine: an override of "
                "_tokenize_prompts has changed them. It must return what super()._tokenize_prompts() returns."
            )
        # TRL reads the first turn for its tool calls, and then asks _tool_call_loop for the rest.
        ends = [r.episode.first_turn if r.episode and self.tools else None for r in rollouts_of(rows)]
        rollouts = list(zip(rollouts_of(rows), ends, strict=True))
        return [list(r.token_ids[:end]) for r, end in rollouts], [list(r.logps[:end]) for r, end in rollouts]

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        rows = self._current_batch.rows
        if rows is None:
            with scoring_outside_training(self):
                return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._current_batch.scored = True
        replay_logs(rows, self._log_completion_extra, self._log_metric)
        if self.log_completions:
            for column, values in completion_columns(rows, self.state.global_step).items():
                self._log_completion_extra(column, values)
        replayed = [
            func if isinstance(func, nn.Module) else replayed_rewards(rows, column)
            for column, func in enumerate(self.reward_funcs)
        ]
        with temporarily(self, reward_funcs=replayed):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._current_batch.rewards = rewards[len(rows) * self._team.rank :][: len(rows)].tolist()
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._running:
            check_prepared(type(self).__name__, not self._in_step)
            check_outside_training(self.rollout)
            return super()._generate_and_score_completions(inputs)
        current = self._current_batch
        check_first_preparation(current.rows)
        current.sampled = current.scored = False
        compares = self._starts_comparison()
        # The environments are those of episodes that are being played, and have been reset for them.
        with (
            self._old_logps_only_if(self.args.recomputes_proximal or compares),
            self._without_environments(),
            one_input_hook(self.model),
            replayed_images(self, current),
            self._reading_images_of_completions(),
        ):
            batch = super()._generate_and_score_completions(rows_for_trl(current, inputs))
        rows = current.pop_rows()
        check_preparation(
            type(self).__name__,
            batch,
            rows,
            pad_token_id=self._tokenizer.pad_token_id,
            sampled=current.sampled,
            scored=current.scored,
        )
        check_prepared_images(batch, images_of(rows))
        counted_by_row(batch)
        if compares:
            batch["compared_logps"] = batch.pop("old_per_token_logps")
        number_of_rows, length = batch["completion_ids"].shape
        device = batch["completion_ids"].device
        # TRL makes this one in torch's default dtype, which rounds if a script has set it to half precision.
        batch["sampling_per_token_logps"] = behavior_logps(rows, length).to(device)
        if self.model.training and (self.log_completions or self._rollout_log.share):
            first = (current.take_number * self._team.size + self._team.rank) * number_of_rows
            places = range(first, first + number_of_rows)
            batch["log_row"] = torch.tensor(places, device=device)
            self._rollout_log.taken(rows, places, current.rewards, batch, self.state.global_step)
        batch["behavior_versions"] = behavior_versions(rows, length).to(device)
        batch["staleness"] = token_staleness(batch["behavior_versions"], self.state.global_step)
        return batch

    @contextmanager
    def _without_environments(self) -> Iterator[None]:
        """Inside, TRL neither makes nor resets environments."""
        with temporarily(self, environment_factories=None, environments=None):
            yield

    @contextmanager
    def _reading_images_of_completions(self) -> Iterator[None]:
        """Inside, TRL looks for images in the completions of a rollout function too, as it does where there are
        tools."""
        if self.rollout is None or not any(later_pictures_of(self._current_batch.rows or ())):
            yield
            return
        with temporarily(self, tools=[self.rollout]):  # `_generate` has none again
            yield

    def _starts_comparison(self) -> bool:
        """Whether `compare_proximal_every` has the anchors compared in this batch."""
        every = self.args.compare_proximal_every
        if not every or not self.model.training:
            return False
        return self._current_batch.starts_comparison(every, self.state.global_step)

    @contextmanager
    def _old_logps_only_if(self, wanted: bool) -> Iterator[None]:
        """Inside, TRL computes the old log-probs if they are `wanted`, and only then.

        TRL runs a forward pass for them if gradient accumulation and generation are not aligned. Inside
        `_generate_and_score_completions`, these two numbers decide nothing else.
        """
        misaligned = self.args.gradient_accumulation_steps + 1
        steps = misaligned if wanted else 1
        with temporarily(self.args, steps_per_generation=steps), temporarily(self, num_iterations=1):
            yield
