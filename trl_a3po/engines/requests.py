"""What a decoder can be asked: prompts that fit its model, tokens of its vocabulary.

Guarantees: what is refused costs no forward, and the words say what to change.
"""

from collections.abc import Sequence

from trl_a3po.protocol.engine import GroupRequest, SamplingSettings


def check_request(
    request: GroupRequest, sampling: SamplingSettings, *, vocab_size: int, max_prompt_tokens: int | None, room: str
) -> None:
    """Raise `ValueError` for a prompt that is empty, holds an id outside the vocabulary or does not fit, and for less
    than one rollout.

    Args:
        max_prompt_tokens: longest prompt that fits beside the `max_new_tokens` of `sampling`. A request for fewer new
            tokens, such as a later turn, leaves more room for what it continues.
        room: says what it has to fit into, behind "max_new_tokens=...".
    """
    prompt, name = request.prompt_ids, f"Request {request.request_id}"
    new_tokens = request.settings(sampling).max_new_tokens
    if not 1 <= new_tokens <= sampling.max_new_tokens:
        raise ValueError(
            f"{name} asks for max_new_tokens={new_tokens}: it must be between 1 and the run's max_new_tokens="
            f"{sampling.max_new_tokens}."
        )
    if request.num_rollouts < 1:
        raise ValueError(f"{name} asks for num_rollouts={request.num_rollouts}: it must be at least 1.")
    if not prompt:
        raise ValueError(f"{name} has an empty prompt: give it at least one token.")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(
            f"{name} holds token ids from {min(prompt)} to {max(prompt)}, but the model's vocabulary is 0 to "
            f"{vocab_size - 1}: the tokenizer does not belong to this model."
        )
    longest = None if max_prompt_tokens is None else max_prompt_tokens + sampling.max_new_tokens - new_tokens
    if longest is not None and len(prompt) > longest:
        raise ValueError(
            f"{name} has a prompt of {len(prompt)} tokens, but at most {longest} fit beside max_new_tokens="
            f"{new_tokens}{room}: shorten the prompt, lower max_completion_length or raise max_prompt_tokens if it "
            "was set."
        )


def number_of_images(request: GroupRequest) -> int:
    """How many images its tokens show."""
    return 0 if request.images is None else len(request.images.images)


def added_images(request: GroupRequest) -> int:
    """How many images are new in this turn."""
    added = None if request.images is None else request.images.added
    return 0 if added is None else len(added.images)


def check_scored(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], *, vocab_size: int, context: int | None
) -> None:
    """Raise `ValueError` for known tokens that cannot be scored."""
    texts = (*prompt_ids, *completion_ids)
    if not prompt_ids or not completion_ids:
        raise ValueError("Nothing can be scored without at least one prompt and one completion token.")
    if not 0 <= min(texts) <= max(texts) < vocab_size:
        raise ValueError(
            f"Token ids from {min(texts)} to {max(texts)} cannot be scored: the model's vocabulary is 0 to "
            f"{vocab_size - 1}."
        )
    if context is not None and len(texts) > context:
        raise ValueError(f"{len(texts)} tokens cannot be scored: the model's context is {context}.")


def longest_prompt(asked: int | None, *, new_tokens: int, context: int | None) -> int | None:
    """The longest prompt that is accepted with a completion of `new_tokens`: as `asked`, or what the model's context
    leaves, which is less than 1 where only shorter completions fit.

    Raises:
        ValueError: the context leaves less than `asked`.
    """
    room = None if context is None else context - new_tokens
    if room is not None and asked is not None and asked > room:
        raise ValueError(
            f"max_new_tokens={new_tokens} and max_prompt_tokens={asked} are together more than the model's context of "
            f"{context} tokens allows: lower max_completion_length or max_prompt_tokens."
        )
    return room if asked is None else asked
