"""What test files share; says at the end what a run of the tests left out.

The whole set is spread over the cores, one file to a process at a time, so that what a file starts is started once. A
room, a file or a single test runs in this process, where prints and the debugger work.
"""

import contextlib
import gc
import os
import signal
from collections import Counter

import pytest

# Before torch and the Hub's client are imported. Processes that share the cores have one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MARKERS = ("long", "slow", "gpu", "vllm")
DESELECTED = pytest.StashKey[Counter]()
MOST_PROCESSES = 4


@pytest.fixture(scope="module", autouse=True)
def imports_are_not_garbage():
    """Accelerate collects garbage in every training, which takes as long as the training itself while it looks through
    the million objects that torch and transformers consist of."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_watchdog_and_no_reward_worker_outlives_a_test():
    """An engine may, because tests share it."""
    from tests.workers.processes import children_that_run, until

    def running():
        return children_that_run("trl_a3po.workers.watchdog_process") | children_that_run("trl_a3po.rewards.worker")

    before = running().keys()
    yield
    with contextlib.suppress(AssertionError):
        until(lambda: running().keys() <= before)
    left = {pid: command for pid, command in running().items() if pid not in before}
    assert not left, f"processes are left: {left}"


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A tiny model and its tokenizer on disk."""
    from tests.tiny import save_tiny_model  # which imports torch and transformers

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def same_rows_in_each_micro_batch(monkeypatch):
    """TRL shuffles a generation batch with the global generator, which other things also draw from."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """How many processes `-n auto` means. Tests of a GPU or of a vLLM share one, so they take turns."""
    selected = config.option.markexpr.replace("not gpu", "").replace("not vllm", "")
    if config.option.file_or_dir or "gpu" in selected or "vllm" in selected:
        return 0
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def pytest_configure(config):
    # A shell has what it starts in the background ignore Ctrl-C, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[DESELECTED] = Counter()


def pytest_collection_modifyitems(items):
    """In one of several processes, the files with the longest tests come first, so that no process waits for them at
    the end. A long test is one with a timeout of its own."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    longest: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("timeout")
        longest[item.path] = max(longest[item.path], marker.args[0] if marker else 0)
    items.sort(key=lambda item: -longest[item.path])


def pytest_deselected(items):
    for item in items:
        for marker in MARKERS:
            if item.get_closest_marker(marker):
                item.config.stash[DESELECTED][marker] += 1


def pytest_sessionfinish(session):
    if "PYTEST_XDIST_WORKER" in os.environ:
        session.config.workeroutput["deselected"] = dict(session.config.stash[DESELECTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Every process has left out the same tests."""
    if not error:
        node.config.stash[DESELECTED] = Counter(node.workeroutput["deselected"])


def pytest_terminal_summary(terminalreporter, config):
    left_out = config.stash[DESELECTED]
    for marker in MARKERS:
        if left_out[marker]:
            terminalreporter.write_line(
                f"not run: {left_out[marker]} tests marked {marker}; run them with -m {marker}"
            )
