"""Rollouts of several turns: the object that a rollout function is given, and what it returns."""

from trl_a3po.episodes.episode import Endpoint, Episode, EpisodeResult, RolloutFunction, Turn

__all__ = ["Endpoint", "Episode", "EpisodeResult", "RolloutFunction", "Turn"]
