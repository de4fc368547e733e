"""Log-probs of known tokens, from a vLLM server."""

from collections.abc import Sequence

from trl_a3po.engines.vllm.servers.completions import (
    SCORES_PER_CALL,
    parse_prompt_score,
    parse_score,
    prompt_score_body,
    score_body,
)
from trl_a3po.engines.vllm.servers.http import AnswerFault
from trl_a3po.engines.vllm.servers.pooled_server import ServedWeights
from trl_a3po.engines.vllm.servers.server import Server
from trl_a3po.protocol.engine import SamplingSettings


def score(
    server: Server,
    served_weights: ServedWeights,
    sampling: SamplingSettings,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    timeout: float,
) -> list[float]:
    """Log-probs of `completion_ids` after `prompt_ids`, as rollouts get them; no prefix is reused.

    Raises:
        HttpFault: the server did not give them.
    """
    found: list[float] = []
    for start in range(0, len(completion_ids), SCORES_PER_CALL):
        body = score_body(
            sampling.temperature, served_weights.model, served_weights.salt, prompt_ids, completion_ids, start
        )
        logps = parse_score(server.completion(body, timeout).text(), completion_ids, start)
        if logps is None:
            return _of_the_prompt(server, served_weights, sampling, prompt_ids, completion_ids, timeout)
        found += logps
    return found


def _of_the_prompt(
    server: Server,
    served_weights: ServedWeights,
    sampling: SamplingSettings,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    timeout: float,
) -> list[float]:
    """The same where the server has no `logprob_token_ids`: a prompt's log-probs know no temperature, no filter."""
    if sampling.temperature != 1.0:
        raise AnswerFault(
            f"{server.url} cannot give log-probs of known tokens at temperature={sampling.temperature:g}, which this "
            "version of vLLM can do only at 1.0: use a newer version, or set delivery_check_steps=0."
        )
    body = prompt_score_body(served_weights.model, served_weights.salt, prompt_ids, completion_ids)
    return parse_prompt_score(server.completion(body, timeout).text(), completion_ids)
