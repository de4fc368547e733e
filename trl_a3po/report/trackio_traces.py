"""Rollouts as trackio's traces, beside the metrics of a run, as TRL's asynchronous trainer logs them.

Guarantees: up to `MOST` rollouts of a batch are logged, and the next only `EVERY` policy versions later: traces are
there to be read, and too many make the dashboard slow.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from trl_a3po.protocol.plain_copy import plain_copy
from trl_a3po.protocol.records import Group
from trl_a3po.report.token_texts import TokenTexts
from trl_a3po.rollout.batch_rows import Row, example_of, prompt_ids_of

EVERY, MOST = 8, 8


class TrackioTraces:
    """Logs traces to the run that trackio's callback has begun.

    Args:
        tokenizer: makes the texts.
        reward_names: the names of the reward functions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reward_names: Sequence[str]):
        self._texts = TokenTexts(tokenizer)
        self._reward_names = list(reward_names)
        self._logged: int | None = None  # version

    def taken(self, groups: Sequence[Group], version: int) -> None:
        """Log rollouts of `groups`, which were taken at `version`, if traces are due. Main process only."""
        if self._logged is not None and self._logged <= version < self._logged + EVERY:
            return
        import trackio  # not installed where report_to does not name it

        self._logged = version
        traces = [trackio.Trace(**self._trace(row, version)) for row in _first_rows(groups)]
        trackio.log({"rollouts": traces}, step=version)

    def _trace(self, row: Row, version: int) -> dict[str, Any]:
        group, number = row
        rollout = group.rollouts[number]
        rewards = [] if group.score is None else group.score.rewards[number]
        completion = self._texts.text(rollout.token_ids) if rollout.episode is None else rollout.episode.messages
        metadata = {
            **{f"rewards/{name}": reward for name, reward in zip(self._reward_names, rewards, strict=False)},
            "group_id": group.prompt.index,
            "model_version": min(rollout.sampled_versions),
            "staleness": version - min(rollout.sampled_versions),
            "prompt_tokens": len(prompt_ids_of(row)),
            "completion_tokens": len(rollout.token_ids),
            "finish_reason": rollout.finish_reason,
        }
        prompt = example_of(row).get("prompt")
        messages = [*_messages(prompt, "user"), *_messages(completion, "assistant")]
        return {"messages": messages, "metadata": metadata}


def _first_rows(groups: Sequence[Group]) -> Iterator[Row]:
    """The first rollouts of each group, `MOST` in all, so that groups can be compared and so can rollouts."""
    each = max(1, MOST // max(1, len(groups)))
    for group in groups[:MOST]:
        for number in range(min(each, len(group.rollouts))):
            yield group, number


def _messages(content: Any, role: str) -> list[dict[str, Any]]:
    """Messages as they are, and a text as a message of `role`."""
    if isinstance(content, list):
        return [dict(message) for message in plain_copy(content)]
    return [{"role": role, "content": str(content)}]
