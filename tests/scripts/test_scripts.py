"""Published scripts, in shape, under both names: with `GRPOTrainer`, and with one import changed to `A3POTrainer`.

At `max_staleness=0`, parameters, prompts, callbacks, logs and files are compared; at the default staleness, the number
of steps and the prompts that were trained. The page on switching has the table.
"""

import re

import pytest
from transformers import AutoTokenizer

from tests.scripts.compare import SHAPES, differences, run
from tests.test_docs import ROOT, rows
from tests.tiny import save_tiny_model

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"
)
ALWAYS = ("curriculum", "own_loss", "token_advantages", "several_iterations", "weighted_rewards", "dynamic_sampling")
NAMES = sorted(path.stem for path in SHAPES.glob("[a-z]*.py"))
# What cannot run, and what its error says.
REFUSED = {"dynamic_sampling": "To replace groups, set drop_zero_variance_groups=True, or pass an on_group function"}


def table() -> dict[str, list[str]]:
    """The table of the page on switching: script -> its cells."""
    found = rows(ROOT / "docs" / "switching.md", "script")
    return {re.findall(r"shapes/(\w+)\.py", cells[0])[0]: cells[1:] for cells in found}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("same_rows_in_each_micro_batch")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in NAMES]
)
def test_a_script_runs_under_both_names(name, chat_model, tmp_path, monkeypatch):
    theirs = run(name, "GRPOTrainer", chat_model, tmp_path / "grpo", monkeypatch)
    at_zero, by_default = table()[name][1:]
    if name in REFUSED:
        for arm in ("A3POTrainer at staleness 0", "A3POTrainer"):
            with pytest.raises((ValueError, RuntimeError), match=re.escape(REFUSED[name])):
                run(name, arm, chat_model, tmp_path / arm, monkeypatch)
        assert at_zero.startswith("refused") and by_default.startswith("refused")
        return
    fresh = run(name, "A3POTrainer at staleness 0", chat_model, tmp_path / "fresh", monkeypatch)
    assert (", ".join(differences(fresh, theirs)) or "the same") == at_zero
    stale = run(name, "A3POTrainer", chat_model, tmp_path / "stale", monkeypatch)
    assert (stale.steps, stale.trained_on) == (theirs.steps, theirs.trained_on)
    assert all(value.isfinite().all() for value in stale.parameters.values())
    assert by_default == "runs, the same prompts"


def test_the_page_on_switching_has_a_row_for_every_script():
    assert sorted(table()) == NAMES
    for name, (what, *_) in table().items():
        told = (SHAPES / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
        assert what == re.sub(r"\s+", " ", told).rstrip("."), name
