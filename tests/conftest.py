"""Says aloud what a run of the tests left out."""

from collections import Counter

import pytest

MARKERS = ("slow", "gpu", "vllm")
DESELECTED = pytest.StashKey[Counter]()


def pytest_configure(config):
    config.stash[DESELECTED] = Counter()


def pytest_deselected(items):
    for item in items:
        for marker in MARKERS:
            if item.get_closest_marker(marker):
                item.config.stash[DESELECTED][marker] += 1


def pytest_terminal_summary(terminalreporter, config):
    left_out = config.stash[DESELECTED]
    for marker in MARKERS:
        if left_out[marker]:
            terminalreporter.write_line(
                f"not run: {left_out[marker]} tests marked {marker}; run them with -m {marker}"
            )
