"""What test files share; says aloud what a run of the tests left out."""

from collections import Counter

import pytest

MARKERS = ("slow", "gpu", "vllm")
DESELECTED = pytest.StashKey[Counter]()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A tiny model and its tokenizer on disk."""
    from tests.tiny import save_tiny_model  # which imports torch and transformers

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def same_rows_in_each_micro_batch(monkeypatch):
    """TRL shuffles a generation batch with the global generator, which other things also draw from."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)


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
