"""The seed of a rollout's noise, for engines that draw the noise of each rollout by itself: a pure function."""

import hashlib


def noise_seed(run_seed: int, noise_key: int, rollout: int, position: int) -> int:
    """What decides the noise of a rollout from its token `position` on: the run, the request and the rollout's number,
    and nothing else. The seeds of a group's rollouts follow one another, as vLLM counts those of one request."""
    digest = hashlib.blake2b(f"{run_seed} {noise_key} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 2) + rollout
