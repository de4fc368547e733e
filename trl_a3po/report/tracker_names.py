"""The names of metrics in TensorBoard, Weights & Biases and trackio, whose sections are what stands before the first
slash.

Guarantees: pure; a name is changed only by what stands before its first part, so no two names become one.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trl_a3po.report.at_a_glance import PREFIX

OF_TRAINER = "train/"


def in_sections(rewrite_logs: Callable[[Any], dict[str, Any]]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """`rewrite_logs` of transformers, whose only sections are `train` and `eval`, with a section for each part of this
    package: `queue/ready` instead of `train/a3po/queue/ready`."""

    def rewritten(logs: Mapping[str, Any]) -> dict[str, Any]:
        return {tracker_name(name): value for name, value in rewrite_logs(logs).items()}

    return rewritten


def tracker_name(name: str) -> str:
    """What transformers would call `train/a3po/queue/ready` is `queue/ready`, and `train/a3po/ess` is `a3po/ess`."""
    ours = name.removeprefix(OF_TRAINER)
    if ours == name or not ours.startswith(PREFIX):
        return name
    part = ours.removeprefix(PREFIX)
    return part if "/" in part else ours
