"""Checks of the groups that a take returns: the policy of this run can have sampled the completions, and there is a
reward to train on.

Guarantees: completions of another model, and a batch without any reward, never reach the loss.
"""

import math
from collections.abc import Sequence

from trl_a3po.errors import EngineError, RewardError
from trl_a3po.protocol.records import Group


def check_completions(groups: Sequence[Group], max_completion_length: int, vocab_size: int) -> None:
    """Raise `EngineError` for a completion that no policy of this run can have sampled."""
    for group in groups:
        for rollout in group.rollouts:
            where = f"The engine returned a completion of prompt {group.prompt.index}"
            if not 0 <= min(rollout.token_ids) <= max(rollout.token_ids) < vocab_size:
                raise EngineError(
                    f"{where} with token ids from {min(rollout.token_ids)} to {max(rollout.token_ids)}, but the "
                    f"model's vocabulary is 0 to {vocab_size - 1}: the engine samples from another model."
                )
            if len(rollout.token_ids) > max_completion_length:
                raise EngineError(
                    f"{where} of {len(rollout.token_ids)} tokens, more than max_completion_length="
                    f"{max_completion_length}: the engine must stop there."
                )
            if rollout.episode is None and min(rollout.versions) < 0:
                raise EngineError(
                    f"{where} that holds tokens of version -1, which no policy sampled. Only an episode has such "
                    "tokens, between its turns: the engine must leave them out."
                )


def has_reward(groups: Sequence[Group]) -> bool:
    """Whether a reward function has scored any of the completions."""
    scores = [group.score for group in groups if group.score is not None]
    return not all(math.isnan(reward) for score in scores for row in score.rewards for reward in row)


def check_some_reward(scored: bool, names: Sequence[str]) -> None:
    """Raise `RewardError` unless a reward function has scored a completion of the generation batch."""
    if not scored:
        raise RewardError(
            f"No completion of a generation batch got a reward: {', '.join(map(repr, names))} returned None for all "
            "completions, so there is nothing to train on. Return a number for some of them, or remove the rows to "
            "which no reward function applies."
        )
