"""How a token is drawn: counter-based noise, the filters of `generate`, and the inverse of the distribution function.

Guarantees: the noise of a token is a pure function of (seed, noise_key, rollout number, position); a row's token and
log-prob depend on that row alone; the log-prob is that of the policy at its temperature, before any filter.
"""

from typing import NoReturn

import numpy as np
import torch

from trl_a3po.protocol.engine import SamplingSettings

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def noise_stream(seed: int, noise_key: int, rollout: int) -> int:
    """64-bit key of one rollout's noise (the SplitMix64 finaliser, chained over the three numbers)."""
    state = 0
    for word in (seed, noise_key, rollout):
        state = (((state ^ word) & _MASK) + _GAMMA) & _MASK
        state = ((state ^ (state >> 30)) * _MIX[0]) & _MASK
        state = ((state ^ (state >> 27)) * _MIX[1]) & _MASK
        state ^= state >> 31
    return state


def uniform_noise(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in (0, 1), one for each (stream, position), on a grid of 2^-48.

    Args:
        streams: `(N,)` uint64 keys from `noise_stream`.
        positions: `(N,)` int64, 0 for a completion's first token.
    """
    state = streams + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX[0])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX[1])
    state ^= state >> np.uint64(31)
    # 48 bits: the number times a sum of probabilities stays strictly below that sum in float64.
    noise: np.ndarray = ((state >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48
    return noise


class Sampler:
    """Draws one token a row under fixed settings.

    Raises:
        ValueError: a setting outside its range, or token ids outside the vocabulary.
    """

    def __init__(self, sampling: SamplingSettings, vocab_size: int, device: torch.device):
        check_sampling(sampling, vocab_size)
        self._sampling = sampling
        self._stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        self._suppress_ids = torch.tensor(sampling.suppress_token_ids, dtype=torch.long, device=device)

    @property
    def needs_seen(self) -> bool:
        """Whether `scores` reads which tokens a sequence already holds."""
        return self._sampling.repetition_penalty != 1.0

    def too_early(self, generated: torch.Tensor) -> torch.Tensor | None:
        """Rows that may not stop yet, `(N,)` bool, given how many tokens each has; `None`: every row may."""
        return generated < self._sampling.min_new_tokens if self._sampling.min_new_tokens else None

    def scores(self, logits: torch.Tensor, too_early: torch.Tensor | None, seen: torch.Tensor | None) -> torch.Tensor:
        """Logits `(N, V)` to the filtered scores `(N, V)`, -inf where a token cannot be drawn.

        In the order of `generate`: repetition penalty, `min_new_tokens`, suppressed tokens, temperature, top-k,
        top-p, min-p.

        Args:
            logits: `(N, V)` fp32.
            too_early: `(N,)` bool, rows that may not stop yet.
            seen: `(N, V)` bool, tokens of the prompt and the completion so far.
        """
        settings = self._sampling
        scores = logits
        if self.needs_seen:
            if seen is None:
                raise ValueError("repetition_penalty needs the tokens that each sequence has seen.")
            penalty = settings.repetition_penalty
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if too_early is not None and len(self._stop_ids):
            scores = scores.index_fill(1, self._stop_ids, -torch.inf).where(too_early[:, None], scores)
        if len(self._suppress_ids):
            scores = scores.index_fill(1, self._suppress_ids, -torch.inf)
        scores = scores / settings.temperature
        if settings.top_k > 0:
            kth = scores.topk(min(settings.top_k, scores.shape[1])).values[:, -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if settings.top_p < 1.0:
            scores = scores.masked_fill(outside_top_p(scores.softmax(1), settings.top_p), -torch.inf)
        if settings.min_p:
            probs = scores.softmax(1)
            scores = scores.masked_fill(probs < settings.min_p * probs.amax(1, keepdim=True), -torch.inf)
        return scores

    def draw(
        self,
        logits: torch.Tensor,
        noise: torch.Tensor,
        too_early: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens and their log-probs, stacked as `(2, N)` float64 so that one copy brings both to the host.

        The log-prob is `log_softmax(logits.float() / temperature)` at the token; NaN where the logits are not finite.

        Args:
            logits: `(N, V)`.
            noise: `(N,)` float64 in (0, 1).
            too_early, seen: see `scores`.
        """
        logits = logits.float()
        logps = (logits / self._sampling.temperature).log_softmax(1)
        # A softmax and not exp(logps): on a CPU an elementwise exp treats the last elements of the batch differently.
        probs = self.scores(logits, too_early, seen).softmax(1)
        cumulative = probs.cumsum(1, dtype=torch.float64)
        tokens = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)
        # NaN rows end up outside the vocabulary: the gather must still be legal, the NaN log-prob tells the caller.
        tokens.clamp_(max=logits.shape[1] - 1)
        return torch.stack([tokens[:, 0].double(), logps.gather(1, tokens)[:, 0].double()])


def outside_top_p(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The tokens that top-p removes, `(N, V)` bool: in the order of their probabilities, and of their ids where these
    are equal, those up to which the probabilities `(N, V)` fp32 add up to at most `1 - top_p`.

    Without a sort: numbers that are not negative have the order of their bits, so 31 halvings find the least
    probability up to which they add up to more.
    """
    # int32 views of floats; a sum over a row does not depend on the other rows.
    bits, rest = probs.view(torch.int32), 1 - top_p
    high = bits.amax(1, keepdim=True)
    low = torch.full_like(high, -1)
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = probs.where(bits <= middle, 0.0).sum(1, keepdim=True) > rest
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    below, ties = bits < high, bits == high
    mass = probs.where(below, 0.0).sum(1, keepdim=True) + high.view(torch.float32) * ties.cumsum(1)
    last = ties.cumsum(1) == ties.sum(1, keepdim=True)
    return below | (ties & (mass <= rest) & ~last)


def check_sampling(sampling: SamplingSettings, vocab_size: int) -> None:
    def refuse(name: str, need: str) -> NoReturn:
        raise ValueError(f"{name}={getattr(sampling, name)} cannot be sampled with: it must be {need}.")

    if not 0 < sampling.temperature < float("inf"):
        refuse("temperature", "a number above 0 (greedy decoding has no log-probs to train on)")
    if not 0 < sampling.top_p <= 1:
        refuse("top_p", "above 0 and at most 1 (1 switches it off)")
    if sampling.top_k < 0:
        refuse("top_k", "0 (off) or more")
    if sampling.min_p is not None and not 0 <= sampling.min_p <= 1:
        refuse("min_p", "None (off) or between 0 and 1")
    if not 0 < sampling.repetition_penalty < float("inf"):
        refuse("repetition_penalty", "above 0 (1 switches it off)")
    if sampling.max_new_tokens < 1:
        refuse("max_new_tokens", "at least 1")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        refuse("min_new_tokens", f"between 0 and max_new_tokens={sampling.max_new_tokens}")
    for name in ("stop_token_ids", "suppress_token_ids"):
        if any(not 0 <= token < vocab_size for token in getattr(sampling, name)):
            refuse(name, f"token ids of the model's vocabulary, 0 to {vocab_size - 1}")
    allowed = set(range(vocab_size)) - set(sampling.suppress_token_ids)
    if sampling.min_new_tokens:
        allowed -= set(sampling.stop_token_ids)
    if not allowed:
        refuse("suppress_token_ids", "short enough to leave a token to sample")
