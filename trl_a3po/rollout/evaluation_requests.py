"""The prompts of an evaluation batch, which share the engine with the run's own: what is to be submitted, what came
back, and what to try again.

Guarantees: when `done`, every prompt has its rollouts; an attempt that failed is submitted again, a bounded number of
times; request ids are negative and never reused, so they cannot be confused with those of the run's own prompts.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from trl_a3po.errors import EngineError
from trl_a3po.protocol.engine import GroupEnd, GroupFailed, GroupRequest
from trl_a3po.protocol.images import PromptImages
from trl_a3po.protocol.records import Rollout

_request_ids = itertools.count(-1, -1)


class EvaluationRequests:
    """One batch of prompts. It takes one caller at a time.

    Args:
        prompts: token ids of each prompt.
        num_rollouts: rollouts per prompt.
        first_noise_key: prompt number i is sampled with the noise of `first_noise_key + i`.
        max_attempts: attempts at a prompt before `EngineError` is raised.
        rows: the dataset row of each prompt, for requests that are episodes.
        new_tokens: as in `GenerationQueue`; it is not asked for episodes.
        images: those of each prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        num_rollouts: int,
        first_noise_key: int,
        max_attempts: int,
        rows: Sequence[dict[str, Any]] | None = None,
        new_tokens: Callable[[int], int | None] = lambda prompt_tokens: None,
        images: Sequence[PromptImages | None] | None = None,
    ):
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._rows: list[dict[str, Any] | None] = [None] * len(self._prompts) if rows is None else [*rows]
        self._new_tokens = [
            None if row is not None else new_tokens(len(self._prompts[i])) for i, row in enumerate(self._rows)
        ]
        self._images = [None] * len(self._prompts) if images is None else [*images]
        self._num_rollouts = num_rollouts
        self._first_noise_key = first_noise_key
        self._max_attempts = max_attempts
        self._attempts = [0] * len(self._prompts)
        self._results: list[list[Rollout] | None] = [None] * len(self._prompts)
        self._to_submit = list(range(len(self._prompts)))
        self._by_request: dict[int, int] = {}

    @property
    def done(self) -> bool:
        return all(result is not None for result in self._results)

    @property
    def rollouts_in_engine(self) -> int:
        return len(self._by_request) * self._num_rollouts

    def rollouts(self) -> list[list[Rollout]]:
        """The rollouts of each prompt, in the order of the prompts."""
        return [result for result in self._results if result is not None]

    def submissions(self) -> list[GroupRequest]:
        """The requests to submit to the engine now. Each is returned once."""
        numbers, self._to_submit = self._to_submit, []
        return [self._request(number) for number in numbers]

    def engine_event(self, event: GroupEnd) -> None:
        """Handle the end of a request in the engine. A request of an earlier batch is ignored.

        Raises:
            EngineError: the last attempt at a prompt failed.
        """
        number = self._by_request.pop(event.request_id, None)
        if number is None:
            return
        if isinstance(event, GroupFailed):
            if self._attempts[number] >= self._max_attempts:
                raise EngineError(
                    f"Prompt {number} of the evaluation batch failed {self._attempts[number]} times: {event.reason}"
                )
            self._to_submit.append(number)
        else:
            self._results[number] = event.rollouts

    def _request(self, number: int) -> GroupRequest:
        self._attempts[number] += 1
        request_id = next(_request_ids)
        self._by_request[request_id] = number
        noise_key, prompt_ids = self._first_noise_key + number, self._prompts[number]
        return GroupRequest(
            request_id,
            noise_key,
            prompt_ids,
            self._num_rollouts,
            max_new_tokens=self._new_tokens[number],
            images=self._images[number],
            row=self._rows[number],
        )
