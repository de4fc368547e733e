"""The report on runs is one page that loads nothing, shows whatever a run holds as text, and stays small and quick."""

import base64
import gzip
import json
import re
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from markupsafe import escape

from tests.report.made_lines import LINES, group, start
from tests.runs import RunsAhead, build
from trl_a3po.cli.main import main
from trl_a3po.report.html.activity import mean_number
from trl_a3po.report.html.figures import ratios_by_staleness
from trl_a3po.report.html.reported_run import ReportedRun, read_run, without_pauses
from trl_a3po.report.html.samples import packed_samples
from trl_a3po.report.html.write_report import report_page
from trl_a3po.report.verdict import verdict_of

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> & \u2028 🙂 \"'"
LOCAL = ("file:", "data:", "blob:")
TWICE = """[...document.querySelectorAll('.plot')].flatMap(plot => ['xtick', 'ytick', 'y2tick'].flatMap(axis => {
    const texts = [...plot.querySelectorAll(`.${axis} text`)].map(text => text.textContent);
    return new Set(texts).size < texts.length ? [`${plot.dataset.chart} ${axis}: ${texts}`] : [];
}))"""
"""Axes on which two ticks have the same label."""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(model_path, tmp_path_factory):
    trainer = build(model_path, tmp_path_factory.mktemp("reported"), max_staleness=3, max_steps=6)
    trainer.add_callback(RunsAhead(trainer, 4))
    trainer.train()
    return trainer.args.output_dir


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    from pathlib import Path

    return read_run("a run", Path(folder))


def charts(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)[1])


def unpacked(packed: str) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def rollout(number: int, text: str = "a b", prompt: str = "p") -> dict:
    tokens = re.findall(r".{1,2}", text, re.S)
    facts = {
        "prompt": number // 4,
        "rollout": number % 4,
        "version": 3,
        "length": len(tokens),
        "finish_reason": "stop",
    }
    values = {name: [0.5] * len(tokens) for name in ("weights", "entropies")}
    logps = {"behavior_logps": [-1.0] * len(tokens), "policy_logps": [-1.25] * len(tokens)}
    rewards = {"rewards": {"reward": number % 7 / 7}, "advantage": 0.1}
    return {
        **facts,
        **values,
        **logps,
        **rewards,
        "prompt_text": prompt,
        "tokens": tokens,
        "versions": [2] * len(tokens),
    }


def test_the_command_writes_a_page_of_several_runs(folder, tmp_path, capsys):
    main(["report", folder, folder, "--output", str(tmp_path / "deep" / "page.html")])
    page = (tmp_path / "deep" / "page.html").read_text()
    assert "A3POTrainer (2)" in page and "page.html shows" in capsys.readouterr().out
    assert {"compare-reward", "compare-staleness"} <= charts(page)["compare"].keys()
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "page.html"]


def test_the_page_says_how_many_rows_were_left_out_if_any_were(run):
    left_out = [{"kind": "left_out", "time": 1.0, "row": n, "dataset_row": n, "reason": "<b>"} for n in range(2)]
    assert "rows left out" not in report_page([run])
    page = report_page([replace(run, lines=[*run.lines, *left_out])])
    assert re.search(r"<dt>rows left out</dt>\s*<dd>2 \(2 &lt;b&gt;\)</dd>", page)


def test_the_page_has_every_chart_and_loads_nothing(run):
    page = report_page([run])
    shown = charts(page)["0"]
    assert shown.keys() >= {
        "activity", "gantt", "staleness", "staleness-share", "ratios", "entropy-by-staleness",
        "ess", "reward", "reward-distribution", "length", "length-distribution",
    }  # fmt: skip
    shares = shown["staleness-share"]["data"][0]
    assert sum(shares["y"]) == pytest.approx(1, abs=1e-4) and max(shares["x"]) == 3
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import""", ours)
    assert "default-src 'none'" in ours


def test_what_a_run_holds_ends_no_element(run):
    hostile = ReportedRun(HOSTILE, run.lines, run.history, [rollout(0, HOSTILE, HOSTILE)], [f"PROBLEM: {HOSTILE}"])
    page, plain = report_page([hostile]), report_page([run])
    assert "&lt;/script&gt;" in page and "<img" not in page and "<script>document.title" not in page
    assert page.count("</script>") == plain.count("</script>")


def test_a_run_without_a_timeline_is_reported(run):
    page = report_page([ReportedRun("old", [], run.history, [])])
    assert "Too few batches" in page and "reward" in charts(page)["0"]


def with_clipping(run, share):
    """The run, with this share of the tokens clipped and none capped in every step."""
    entries = [
        {key: value for key, value in entry.items() if "/clip/" not in key and "/w/capped" not in key}
        for entry in run.history
    ]
    shares = {
        f"a3po/{d}{key}": share * (key == "clip/high")
        for d in ("", "d0/", "d1/")
        for key in ("clip/high", "clip/low", "w/capped")
    }
    return replace(run, history=[{**entry, **shares} if "reward" in entry else entry for entry in entries])


def test_where_nothing_was_clipped_a_sentence_takes_the_place_of_empty_charts(run):
    says = "No token was clipped, and no w was capped."
    for share in (0.0, 0.25):
        page = report_page([with_clipping(run, share)])
        assert (says in page) == (share == 0.0)
        of_clipping = {"clipping", "clipping-over-time"}
        assert of_clipping & charts(page)["0"].keys() == (of_clipping if share else set())
    entries = [{key: entry[key] for key in ("step", "reward") if key in entry} for entry in run.history]
    assert says not in report_page([replace(run, history=entries)])  # not known


def test_a_name_has_one_colour_in_all_charts_and_a_chart_has_no_colour_twice(run):
    shown = charts(report_page([with_clipping(run, 0.25)]))["0"]
    colours = {}
    for place, chart in shown.items():
        named = {trace["name"]: colour_of(trace) for trace in chart["data"] if "name" in trace}
        assert len(set(named.values())) == len(named), place
        for name, colour in named.items():
            assert colours.setdefault(name, colour) == colour, name
    assert {"clipped low", "engine start", "ready, not taken"} <= colours.keys()


def with_tokens(lines):
    return [line | {"tokens": 8} if line["kind"] == "group" else line for line in lines]


def colour_of(trace):
    return trace.get("fillcolor") or trace["marker"]["color"]


def test_the_ratios_are_defined_before_they_are_drawn_or_named(run):
    page = report_page([run])
    body = page[page.index("<body>") :]
    defined = [body.index(f"<dt>{name}</dt>") for name in ("w", "r", "ρ")]
    assert max(defined) < body.index("w, r and ρ") and max(defined) < body.index("ρ)²")


def test_the_effective_sample_size_shares_no_axis_with_shares_of_tokens(run):
    shown = charts(report_page([with_clipping(run, 0.25)]))["0"]
    named = {place: [trace.get("name") for trace in chart["data"]] for place, chart in shown.items()}
    assert named["ess"] == ["effective sample size"]
    assert sum("effective sample size" in names for names in named.values()) == 1
    assert "share" not in shown["ess"]["layout"]["yaxis"]["title"]["text"]


def test_what_the_top_of_the_page_says_is_not_repeated_as_a_finding(run):
    lines = with_tokens([start(), *LINES])
    said, problem, other = verdict_of(lines).sentence, "PROBLEM: it ended.", "Forecast: as measured."
    page = report_page([replace(run, lines=lines, findings=[said, problem, other])])
    assert [page.count(escape(words)) for words in (said, problem, other)] == [1, 1, 1]
    assert "Findings of trl-a3po doctor" in page
    assert "Findings of trl-a3po doctor" not in report_page([replace(run, lines=lines, findings=[said, problem])])


def test_the_time_in_the_engine_is_told_from_the_time_between_two_groups(run):
    """Four groups that were submitted together and are sampled one after the other, a second and a half each."""
    lines = [group(10.0, 10.0 + 1.5 * n, 20.0, 20.0, 20.0) for n in range(1, 5)]
    page = report_page([replace(run, lines=with_tokens(lines))])
    assert re.search(r"<th scope=\"row\">in the engine</th><td>3.75</td>", page)
    assert "it finished a group every 1.5 s." in page


def test_the_axis_of_ratios_shows_small_differences_and_large_factors():
    def axis(least, most):
        entry = {"step": 1, "reward": 0.0, "a3po/d1/fraction": 1.0}
        ends = {"a3po/d1/w/mean": 1.0, "a3po/d1/w/min": least, "a3po/d1/w/max": most}
        return ratios_by_staleness([{**entry, **ends}], {"w": "w"})["layout"]["yaxis"]

    assert axis(0.998, 1.001).get("type") is None and "tickformat" not in axis(0.998, 1.001)
    assert axis(0.1, 9.0)["type"] == "log"
    assert axis(0.0, 9.0).get("type") is None  # a logarithm has no place for 0


def test_samples_are_packed_as_they_were_kept():
    packed = unpacked(packed_samples([rollout(0, "a🙂b")]))
    assert packed["texts"] == ["a🙂b"] and packed["cuts"] == ["3,1"]  # in UTF-16, as a browser counts
    assert (packed["ratios"], packed["versions"], packed["staleness"]) == (["-25,-25"], ["2x2"], [1.0])


def test_many_samples_are_thinned_evenly_and_counted():
    packed = unpacked(packed_samples([rollout(n) for n in range(5000)], most_characters=100_000))
    assert packed["kept"] == 5000 and 300 < len(packed["texts"]) < 2000
    assert set(np.diff(packed["prompt"])) <= set(range(10))


def test_the_mean_number_of_spans_is_exact():
    edges = np.array([0.0, 1.0, 2.0, 4.0])
    assert mean_number([(0.5, 3.0), (-1.0, 1.5), (9.0, 10.0)], edges).tolist() == [1.5, 1.5, 0.5]


def test_the_time_between_two_processes_is_left_out():
    lines = [
        {"kind": "start", "time": 10.0},
        {"kind": "step", "began": 11.0, "ended": 15.0},
        {"kind": "start", "time": 1000.0},
        {"kind": "step", "began": 1001.0, "ended": 1002.0},
    ]
    moved = without_pauses(lines)
    assert (moved[2]["time"], moved[3]["began"], moved[3]["ended"]) == (15.0, 16.0, 17.0)


def test_wrong_use_ends_with_one_sentence(folder, tmp_path, capsys, monkeypatch):
    for arguments in ([str(tmp_path)], [folder, "--output", str(tmp_path)], [folder] * 8):
        with pytest.raises(SystemExit) as ended:
            main(["report", *arguments])
        assert ended.value.code == 2 and capsys.readouterr().err.startswith("trl-a3po: ")


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium in PATH: the report was not opened in a browser")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, tmp_path):
    contexts = []

    def opened(page: str, **options):
        (tmp_path / "page.html").write_text(page, encoding="utf-8", errors="surrogatepass")
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.faults = []
        tab.on("pageerror", lambda error: tab.faults.append(str(error)))
        tab.on("console", lambda said: tab.faults.append(said.text) if said.type == "error" else None)
        tab.on("request", lambda r: None if r.url[:5] in LOCAL else tab.faults.append(r.url))
        tab.goto(f"file://{tmp_path / 'page.html'}")
        tab.wait_for_selector(".browser[data-applied-in]", timeout=120_000)
        return tab

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.long
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_a_browser_draws_every_chart_without_a_request(opened, run, width, scheme):
    tab = opened(report_page([run]), viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert tab.faults == []
    assert tab.evaluate("document.querySelectorAll('.plot:not(:has(svg))').length") == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(TWICE) == []


@pytest.mark.long
def test_a_browser_shows_html_as_text_and_finds_it(opened, run):
    rollouts = [rollout(0, HOSTILE, HOSTILE), *(rollout(n) for n in range(1, 50))]
    tab = opened(report_page([ReportedRun(HOSTILE, run.lines, run.history, rollouts)]))
    assert tab.title() != "owned" and tab.faults == []
    assert tab.inner_text(".detail .completion") == HOSTILE
    tab.fill(".search", "ONERROR")
    tab.locator(".count", has_text="1 of 50 ").wait_for()
    assert tab.inner_text("mark") == "onerror"
    tab.select_option(".colour", "ratios")
    assert "orange" in tab.inner_text(".legend")
    tab.fill(".search", "")
    tab.select_option(".sort", label="highest reward")
    tab.locator(".row", has_text="0.857").first.wait_for()


@pytest.mark.long
def test_a_hundred_thousand_rollouts_are_listed_and_searched(opened, run):
    words = [f"the answer to question {n} is {n * n}, because of the rule" for n in range(100_000)]
    rollouts = [rollout(n, text) for n, text in enumerate(words)]
    began = time.perf_counter()
    page = report_page([ReportedRun("many", run.lines, run.history, rollouts)])
    assert len(page) < 30_000_000
    tab = opened(page)
    listed = tab.evaluate("document.querySelectorAll('.row').length")
    assert 5 < listed < 60
    print(f"{time.perf_counter() - began:.1f} s, {len(page) / 1e6:.1f} MB, {tab.inner_text('.count')}")
    tab.fill(".search", "question 90")
    tab.locator(".count", has_text="1,111 of 100,000").wait_for()
    print("read, search in ms:", tab.evaluate("Object.assign({}, document.querySelector('.browser').dataset)"))
