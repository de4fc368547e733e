"""Sampling settings as vLLM's `/v1/completions` takes them, and known tokens to be scored: no I/O.

Guarantees: prompts are token ids, so nothing is tokenised again; every setting is sent, so a model's or server's own
defaults decide nothing.

Which log-probs: with temperature 1 the server's `--logprobs-mode` may be "raw_logprobs" (before any filter) or, when
nothing filters, "processed_logprobs". Another temperature is in "processed_logprobs" alone, which filters would
renormalise: such settings are refused.
"""

import math
from collections.abc import Sequence
from typing import Any

from trl_a3po.engines.vllm.servers.http import AnswerFault, decode_json
from trl_a3po.protocol.engine import SamplingSettings

SCORES_PER_CALL = 64  # vLLM takes at most 128 `logprob_token_ids`


def logprobs_modes(sampling: SamplingSettings) -> tuple[str, ...]:
    """The `--logprobs-mode`s under which the server's log-probs are behavior log-probs, the preferred one first.

    Raises:
        ValueError: no such mode exists for these filters.
    """
    filters = filters_of(sampling)
    if not filters:
        return ("processed_logprobs", "raw_logprobs") if sampling.temperature == 1.0 else ("processed_logprobs",)
    if sampling.temperature == 1.0:
        return ("raw_logprobs",)
    raise ValueError(
        f"engine='vllm' with temperature={sampling.temperature:g} and {', '.join(filters)} cannot give behavior "
        "log-probs: vLLM's are either without the temperature or renormalised by the filter. Set temperature=1.0, or "
        "leave the filter out, or set engine='transformers'."
    )


def filters_of(sampling: SamplingSettings) -> list[str]:
    """The settings that change the distribution beside the temperature."""
    settings = {
        "top_p": sampling.top_p < 1.0,
        "top_k": sampling.top_k > 0,
        "min_p": bool(sampling.min_p),
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "suppress_tokens": bool(sampling.suppress_token_ids),
        "min_new_tokens": sampling.min_new_tokens > 0,
    }
    return [name for name, is_set in settings.items() if is_set]


def completion_body(
    sampling: SamplingSettings,
    model: str,
    salt: str,
    prompt_ids: Sequence[int],
    *,
    count: int,
    done: int,
    seed: int | None = None,
) -> dict[str, Any]:
    """The request for `count` completions after `prompt_ids`, whose last `done` tokens are the completion's first.

    Args:
        seed: of the first completion's noise; the next has `seed + 1`, and so on.
    """
    body: dict[str, Any] = {
        **_common(model, salt),
        "prompt": list(prompt_ids),
        "n": count,
        "max_tokens": sampling.max_new_tokens - done,
        "min_tokens": max(0, sampling.min_new_tokens - done),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # stop_token_ids has what ends a completion, and nothing else does
    }
    if seed is not None:
        body["seed"] = seed
    if sampling.suppress_token_ids:
        body["logit_bias"] = {str(token): -100.0 for token in sampling.suppress_token_ids}
    return body


def score_body(
    temperature: float, model: str, salt: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], start: int
) -> dict[str, Any]:
    """The request for log-probs of the `SCORES_PER_CALL` completion tokens from `start` on, each as the first token
    sampled after those before it: by the forward, temperature and log-softmax that rollouts go through."""
    ends = range(start, min(start + SCORES_PER_CALL, len(completion_ids)))
    return {
        **_common(model, salt),
        "prompt": [[*prompt_ids, *completion_ids[:end]] for end in ends],
        "logprob_token_ids": sorted({completion_ids[end] for end in ends}),
        "max_tokens": 1,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
    }


def parse_score(text: str, completion_ids: Sequence[int], start: int) -> list[float] | None:
    """The log-probs of the answer to `score_body`; `None` if the server does not know `logprob_token_ids`."""
    tokens = completion_ids[start : start + SCORES_PER_CALL]
    choices = sorted(_choices(decode_json(text)), key=lambda choice: choice.get("index", -1))
    if len(choices) != len(tokens):
        raise AnswerFault(f"An answer has {len(choices)} scores, but {len(tokens)} were asked for.")
    found = []
    for choice, token in zip(choices, tokens, strict=True):
        try:
            found.append(choice["logprobs"]["top_logprobs"][0].get(f"token_id:{token}"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise AnswerFault(f"A score lacks its log-probs: {str(choice)[:300]}.") from error
    return None if any(logp is None for logp in found) else _finite(found)


def prompt_score_body(
    model: str, salt: str, prompt_ids: Sequence[int], completion_ids: Sequence[int]
) -> dict[str, Any]:
    """The request for log-probs of a text at temperature 1, for servers without `logprob_token_ids`."""
    body = {**_common(model, salt), "prompt": [*prompt_ids, *completion_ids], "max_tokens": 1, "prompt_logprobs": 0}
    return body | {"temperature": 1.0, "ignore_eos": True}


def parse_prompt_score(text: str, completion_ids: Sequence[int]) -> list[float]:
    """The log-probs of the answer to `prompt_score_body`."""
    choices = _choices(decode_json(text))
    if len(choices) != 1:
        raise AnswerFault(f"An answer has {len(choices)} scores, but one was asked for.")
    try:
        rows = choices[0]["prompt_logprobs"][-len(completion_ids) :]
        return _finite([row[str(token)]["logprob"] for row, token in zip(rows, completion_ids, strict=True)])
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerFault(f"A score lacks its log-probs: {str(choices[0])[:300]}.") from error


def _finite(logps: list[Any]) -> list[float]:
    if not all(isinstance(logp, int | float) and math.isfinite(logp) for logp in logps):
        raise AnswerFault(f"A score holds something that is not a log-prob: {str(logps)[:300]}.")
    return logps


def _common(model: str, salt: str) -> dict[str, Any]:
    return {
        "model": model,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": salt,  # no prefix of one version's weights serves another's
    }


def _choices(answer: Any) -> list[dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise AnswerFault(f"An answer is not a completion: {str(answer)[:300]}.")
    return choices
