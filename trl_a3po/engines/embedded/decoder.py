"""Continuous batching inside one process, on the forward of a Hugging Face model: no threads, no I/O, no clock.

Guarantees:
- every submitted request ends once: returned by `step` with all its rollouts, or cancelled;
- a token's version is that of the weights which produced its logits: logits are sampled in the step that computes them;
- the noise of a token is a function of (seed, noise_key, rollout number, position) and of nothing else;
- a freed slot is refilled before the next decode step, in submission order (request, then rollout number).
"""

from collections.abc import Iterable
from typing import Literal

import torch

from trl_a3po.engines.protocol import GroupFinished, GroupRequest, SamplingSettings


class SlotDecoder:
    """Samples groups of completions from `model`, `slots` rollouts at a time.

    Args:
        model: a causal language model of transformers, or a `PeftModel` around one, already on `device` and in the
            dtype to sample with. It is put in eval mode; its weights may be changed in place between calls of `step`,
            followed by `set_version`.
        sampling: the same for every request.
        slots: rollouts decoded at the same time.
        max_prompt_tokens: longest prompt accepted; `None`: whatever the model's context leaves beside
            `max_new_tokens`. Needed with `deterministic`, which pads to it.
        kv_on_publish: what `set_version` does to sequences in flight: "keep" their cache, or "recompute" it under the
            new weights before their next token.
        deterministic: tokens and log-probs are bit-equal whatever else is in the batch (one machine, one thread
            count), for the price of padding. Otherwise log-probs agree to 1e-4 in fp32.
        device: where the model lives; `None`: the device of its first parameter.

    Raises:
        ValueError: a sampling setting that cannot hold, or an architecture whose cache is not one key and one value
            per position and layer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sampling: SamplingSettings,
        *,
        slots: int,
        max_prompt_tokens: int | None = None,
        kv_on_publish: Literal["keep", "recompute"] = "keep",
        deterministic: bool = False,
        version: int = 0,
        device: torch.device | str | None = None,
    ):
        raise NotImplementedError

    @property
    def version(self) -> int:
        """Policy version of the weights in `model`."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Nothing is waiting and nothing is being decoded: `step` would do nothing."""
        raise NotImplementedError

    @property
    def active_rollouts(self) -> int:
        """Rollouts that hold a slot."""
        raise NotImplementedError

    @property
    def waiting_requests(self) -> int:
        """Requests none of whose rollouts has started."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Completion tokens sampled so far, those of cancelled requests included."""
        raise NotImplementedError

    def submit(self, request: GroupRequest) -> None:
        """Queue a request; costs no forward.

        Raises:
            ValueError: the prompt is empty, holds an id outside the vocabulary or does not fit, or the id is in use.
        """
        raise NotImplementedError

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Forget these requests and free their slots; unknown ids are ignored."""
        raise NotImplementedError

    def step(self) -> list[GroupFinished]:
        """Give free slots to waiting rollouts (prefill and their first token), then sample one token of every active
        rollout. Returns the groups whose last rollout finished; `[]` when idle.

        Raises:
            EngineError: the model's logits are NaN or infinite.
        """
        raise NotImplementedError

    def set_version(self, version: int) -> None:
        """Say that the weights of `model` were changed in place and are now those of `version`.

        Raises:
            ValueError: `version` is negative, or older than that of sequences in flight.
        """
        raise NotImplementedError
