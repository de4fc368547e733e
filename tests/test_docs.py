"""README and docs name only what exists: links, files, tests, settings, public names; the README's script runs."""

import importlib.util
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from trl import GRPOConfig

import trl_a3po.errors
import trl_a3po.objectives
from tests.house.test_rooms import imports_by_room
from tests.runs import build
from trl_a3po import A3POConfig
from trl_a3po.objectives.table import OBJECTIVES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = [ROOT / "docs" / "settings.md", ROOT / "docs" / "training_forward.md"]
FOLDERS = ("docs", "notebooks", "recipes", "tests", "trl_a3po")
ASYMPO = {"objective": "asympo", "loss_type": "grpo", "scale_rewards": "none"}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the page's headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def named_tests(file: Path) -> set[str]:
    return set(re.findall(r"^\s*def (test_\w+)\(", text_of(file), re.M))


def rows(page: Path, first_header: str) -> list[list[str]]:
    """The rows of every table of the page whose first column has this header."""
    found, inside = [], False
    for line in text_of(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif inside:
            found.append(cells)
        else:
            inside = cells[0] == first_header
    return [cells for cells in found if not set(cells[0]) <= set("-")]


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pages
def test_files_that_are_named_exist(page):
    for path in re.findall(rf"(?:^|[\s`(])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text_of(page), re.M):
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "tests", page.parent)) or "mine" in path, path


@pages
def test_tests_that_are_named_exist(page):
    for file, test in re.findall(r"`([\w/]+\.py)::(test_\w+)`", text_of(page)):
        assert test in named_tests(ROOT / "tests" / file), f"{file}::{test}"


def test_every_complaint_names_a_test():
    complaints = rows(ROOT / "docs" / "complaints.md", "reported")
    assert len(complaints) > 40
    assert [complaint for complaint, covered in complaints if not re.search(r"\.py::test_\w+`", covered)] == []


def test_every_fault_names_a_test():
    faults = rows(ROOT / "docs" / "faults.md", "fault")
    assert len(faults) > 25
    assert [fault for fault, *_, test in faults if not re.search(r"\.py::test_\w+`", test)] == []


def setting_names(cell: str) -> list[str]:
    """The settings that a cell names; one that begins with `_` ends like the one before."""
    names: list[str] = []
    for name in re.findall(r"`([^`]+)`", cell):
        names.append(names[-1].rsplit("_", 1)[0] + name if name.startswith("_") else name)
    return names


@pytest.mark.parametrize("page", SETTINGS, ids=lambda page: page.name)
def test_settings_of_the_tables_are_fields_with_their_defaults(page):
    words = {"off": False, "none": None, "automatic": None}
    table = rows(page, "setting")
    assert table
    for names, default, *_ in table:
        settings, defaults = setting_names(names), default.replace("`", "").split(", ")
        assert settings and set(settings) <= A3POConfig.__dataclass_fields__.keys(), names
        for name, told in zip(settings, defaults, strict=False):
            if re.fullmatch(r'\d+(\.\d+)?|"\w+"|\w+', told):
                value = A3POConfig.__dataclass_fields__[name].default
                assert (words[told] if told in words else told.strip('"').removesuffix(".0")) in (
                    value,
                    str(value).removesuffix(".0"),
                ), name


def test_the_code_of_the_page_on_metrics_reads_a_run(model_path, tmp_path):
    build(model_path, tmp_path, max_staleness=2).train()
    (code,) = re.findall(r"```python\n(.*?)```", text_of(ROOT / "docs" / "metrics.md"), re.S)
    names: dict[str, object] = {}
    exec(code.replace("outputs/lora_24gb", str(tmp_path / "A3POTrainer")), names)
    assert len(names["history"]) == 5 and len(names["steps"]) == 4
    assert len(names["groups"]) == 8 and "w/mean" in names["table"].columns


def documented_metrics() -> list[str]:
    """Patterns of the names in the tables of docs/metrics.md; `…` stands for anything."""
    return metric_names(rows(ROOT / "docs" / "metrics.md", "metric"))


def metric_names(table: list[list[str]]) -> list[str]:
    """The names in the first column, each in full."""
    patterns: list[str] = []
    for cells in table:
        for name in re.findall(r"`([^`]+)`", cells[0]):
            full = name if name.startswith("a3po/") else f"{patterns[-1].rsplit('/', name.count('/') + 1)[0]}/{name}"
            patterns.append(full)
    return patterns


@pytest.mark.parametrize("settings", [{"compare_proximal_every": 1}, ASYMPO, {"schedule": "periodic"}], ids=str)
def test_every_metric_that_a_run_logs_is_explained(model_path, tmp_path, settings):
    trainer = build(model_path, tmp_path, **{"max_staleness": 2, "delivery_check_steps": 2, **settings})
    trainer.train()
    logged = {key for entry in trainer.state.log_history for key in entry if key.startswith("a3po/")}
    logged = {re.sub(r"^a3po/d\d+/", "a3po/d2/", key) for key in logged}
    known = [re.compile(re.escape(name).replace("…", ".+")) for name in documented_metrics()]
    assert len(logged) > 30
    assert {key for key in logged if not any(name.fullmatch(key) for name in known)} == set()


def test_every_page_is_in_the_index():
    index = text_of(ROOT / "docs" / "README.md")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_every_public_name_is_on_a_page_of_the_api():
    api = "\n".join(text_of(page) for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"\w+", api))
    assert {*trl_a3po.__all__, *trl_a3po.objectives.__all__} - shown == set()


def test_every_error_is_explained():
    explained = {name.strip("`") for name, *_ in rows(ROOT / "docs" / "errors.md", "error")}
    errors = {name for name, value in vars(trl_a3po.errors).items() if isinstance(value, type)}
    assert errors - explained == {"A3POError"}  # their base class


def test_the_table_of_rooms_has_every_room_and_what_it_imports():
    def rooms(cell: str) -> set[str]:
        return set(re.findall(r"`(\w+)(?:/|\.py)`", cell))

    table = {name: rooms(cell) for room, _, cell in rows(ROOT / "CONTRIBUTING.md", "room") for name in rooms(room)}
    imported = {room: set(names) for room, names in imports_by_room().items()}
    for room in ("__init__", "__main__"):
        imported.pop(room)
    assert table.keys() == imported.keys()
    assert {room: names - table[room] for room, names in imported.items() if names - table[room]} == {}


@pytest.fixture(scope="module")
def hooks():
    """What `mkdocs build` calls."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_has_a_row_for_every_setting(hooks):
    settings = {setting.name for setting in fields(A3POConfig)} - {setting.name for setting in fields(GRPOConfig)}
    assert settings <= set(re.findall(r"^\| `(\w+)` ", hooks.settings_tables(), re.M))


def test_the_tables_of_objectives_are_what_the_records_say(hooks):
    page = text_of(ROOT / "docs" / "objectives.md")
    assert len(hooks.TABLE.findall(page)) == 4
    assert hooks.with_tables(page) == page, "run: python docs/hooks.py"


def test_the_tables_of_methods_and_settings_are_what_the_checks_say(hooks):
    page = text_of(ROOT / "docs" / "overrides.md")
    assert len(hooks.TABLE.findall(page)) == 2
    assert hooks.with_tables(page) == page, "run: python docs/hooks.py"


def test_the_page_on_objectives_has_a_row_for_every_objective():
    table = rows(ROOT / "docs" / "objectives.md", "objective")
    assert [name.strip("`") for name, *_ in table if name.startswith("`")] == list(OBJECTIVES)


@pytest.mark.parametrize(
    "uri, written, on_the_site",
    [
        ("index.md", "[a](docs/vllm.md#measured)", "[a](vllm.md#measured)"),
        ("vllm.md", "[a](../README.md)", "[a](index.md)"),
        ("api/trainer.md", "[a](../metrics.md)", "[a](../metrics.md)"),
        ("notebooks/index.md", "[a](01_first_run.ipynb)", "[a](01_first_run.md)"),
        ("vllm.md", "[a](https://arxiv.org)", "[a](https://arxiv.org)"),
        ("vllm.md", "[`a`](../recipes/data.py)", "`a`"),
    ],
)
def test_links_of_github_are_links_of_the_site(hooks, uri, written, on_the_site):
    assert hooks.linked(written, uri, source=None) == on_the_site


def test_every_page_is_in_the_navigation_of_the_site():
    site = text_of(ROOT / "mkdocs.yml")
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "README.md" or f": {name}\n" in site, name


def test_the_script_of_the_readme_trains(model_path, tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", text_of(ROOT / "README.md"), re.S)
    assert len(list(filter(None, code.splitlines()))) <= 15
    model, steps = re.compile(r'(?<=A3POTrainer\(")[^"]*'), re.compile(r"max_steps=\d+")
    assert model.search(code) and steps.search(code)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(steps.sub("max_steps=2", model.sub(str(model_path), code)), names)
    history = [entry for entry in names["trainer"].state.log_history if "reward" in entry]
    assert [entry["step"] for entry in history] == [1, 2]


@pages
def test_options_of_the_commands_are_those_of_their_scripts(page):
    """Of every `python recipes/….py`, in a block or in a sentence."""
    for script, words in re.findall(
        r"(?:python|nproc_per_node \d) (recipes/[\w/]+\.py)((?: [^\s`#|]+)*)", text_of(page)
    ):
        folder = (ROOT / script).parent
        source = text_of(ROOT / script)
        # Benchmarks share their loop over arms, and its options.
        source += text_of(folder / "arms.py") if "from arms import" in source else ""
        for option in re.findall(r" --(\w+)", words):
            assert f'"--{option}"' in source or re.search(rf"^    {option}: ", source, re.M), f"{script} --{option}"
