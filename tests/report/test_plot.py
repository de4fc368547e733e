"""The page of a run shows the numbers that were logged, and says what it leaves out."""

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.image import imread

from trl_a3po.report.plot_run import plot_run, run_figure, waiting_share


def history(steps: int, **changes):
    entries = []
    for i in range(steps):
        entry = {"step": i + 1, "reward": i / steps, "step_time": 4.0, "a3po/time/wait": 1.0, "a3po/time/publish": 0.5}
        entry |= {"a3po/staleness/mean": 1.5, "a3po/d1/fraction": 0.5, "a3po/d2/fraction": 0.5, "a3po/ess": 0.9}
        entry |= {"a3po/clip/low": 0.1, "a3po/clip/high": 0.05, "a3po/w/max": 2.0}
        entries.append({**entry, **changes})
    return [*entries, {"train_runtime": 1.0}]


def axes_named(figure, name):
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == name)


@pytest.mark.parametrize("steps", [1, 3, 30, 1000])
def test_runs_of_any_length_are_drawn(tmp_path, steps):
    path = tmp_path / "new" / "run.png"
    plot_run(history(steps), path, title="a run")
    assert imread(path).std() > 0.05


def test_every_reward_is_a_point():
    points, _ = axes_named(run_figure(history(10)), "Reward").lines
    np.testing.assert_allclose(points.get_ydata(), np.arange(10) / 10)


def test_the_parts_of_a_step_add_up_to_its_time():
    bars = axes_named(run_figure(history(5)), "Seconds a step").patches
    heights = np.array([bar.get_height() for bar in bars]).reshape(3, 5)
    np.testing.assert_allclose(heights[:, 0], [2.5, 0.5, 1.0])
    np.testing.assert_allclose(heights.sum(0), 4.0)


def test_the_share_of_waiting_is_that_of_all_steps():
    assert waiting_share(history(2)) == pytest.approx(0.25)


@pytest.mark.parametrize("steps", [61, 90, 119, 120, 600])
def test_many_steps_are_averaged_into_at_most_60_equal_bars(steps):
    bars = axes_named(run_figure(history(steps)), "Seconds a step").patches
    widths = [bar.get_width() for bar in bars[: len(bars) // 3]]
    assert len(widths) <= 60 and len({round(width, 9) for width in widths[:-1]}) == 1
    assert {round(bar.get_height(), 6) for bar in bars} == {2.5, 0.5, 1.0}


def test_the_staleness_panel_stacks_the_shares_and_draws_the_mean():
    figure = run_figure(history(10))
    shares = axes_named(figure, "Staleness").collections
    assert [share.get_paths()[0].get_extents().height for share in shares] == pytest.approx([0.5, 0.5])
    (mean,) = next(axes for axes in figure.axes if axes.texts and axes.texts[0].get_text() == "mean 1.5").lines
    np.testing.assert_allclose(mean.get_ydata(), 1.5)


def test_a_bar_that_leaves_the_page_says_how_tall_it_is():
    entries = history(20)
    entries[7]["step_time"] = 44.0
    axes = axes_named(run_figure(entries), "Seconds a step")
    assert axes.get_ylim()[1] < 44.0 and "44 s" in [text.get_text() for text in axes.texts]


def test_tokens_clipped_low_and_high_are_apart():
    words = {text.get_text() for text in axes_named(run_figure(history(20)), "Trust region").texts}
    assert {"ESS 90.0%", "low 10.0%", "high 5.0%"} <= words


def test_no_two_words_at_the_ends_of_lines_overlap():
    figure = run_figure(history(20, **{"a3po/clip/low": 0.01, "a3po/clip/high": 0.011}))
    figure.draw_without_rendering()
    words = [t for t in axes_named(figure, "Trust region").texts if t.get_text().endswith("%")]
    boxes = sorted((word.get_window_extent() for word in words), key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 for lower, upper in pairwise(boxes))


@pytest.mark.parametrize("wait, verdict", [(0.1, "training-bound"), (0.8, "balanced"), (2.0, "generation-bound")])
def test_the_verdict_follows_from_the_time_waited(wait, verdict):
    axes = axes_named(run_figure(history(4, **{"a3po/time/wait": wait})), "Seconds a step")
    assert any(f"waited {wait / 4:.0%} of the time: {verdict}" in text.get_text() for text in axes.texts)


@pytest.mark.parametrize(
    "gone, panel",
    [
        ("reward", "Reward"),
        ("a3po/staleness/mean", "Staleness"),
        ("a3po/d", "Staleness"),
        ("step_time", "Seconds a step"),
        ("a3po/time/wait", "Seconds a step"),
        ("a3po/clip/low", "Trust region"),
    ],
)
def test_what_was_not_logged_is_left_out_and_named_and_the_rest_is_drawn(gone, panel):
    entries = [{k: v for k, v in entry.items() if not k.startswith(gone)} for entry in history(5)]
    figure = run_figure(entries)
    drawn = {axes.get_title(loc="left") for axes in figure.axes} - {""}
    assert drawn == {"Reward", "Staleness", "Seconds a step", "Trust region"} - {panel}
    assert gone in figure._supxlabel.get_text()


def test_a_history_with_nothing_to_plot_is_refused():
    with pytest.raises(ValueError, match="nothing to plot"):
        run_figure([{"loss": 1.0}])
