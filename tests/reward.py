"""The reward of the runs on the tiny model. Imports nothing, and so a reward worker starts at once."""


def reward(completion_ids, target, **kwargs):
    return [(sum(ids) + t) % 11 / 10 for ids, t in zip(completion_ids, target, strict=True)]
