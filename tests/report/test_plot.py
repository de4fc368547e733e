"""The page of a run shows the numbers that were logged, and says what it leaves out."""

import numpy as np
import pytest
from matplotlib.image import imread

from trl_a3po.report.plot import plot_run, run_figure, waiting_share


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


def test_starting_the_engine_is_no_work_of_a_step():
    bars = axes_named(run_figure(history(2, **{"a3po/time/engine_start": 2.0})), "Seconds a step").patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(2 * 2.0)
    assert waiting_share(history(2, **{"a3po/time/engine_start": 2.0})) == pytest.approx(0.5)


def test_many_steps_are_averaged_into_bars():
    bars = axes_named(run_figure(history(600)), "Staleness").patches
    assert len(bars) == 2 * 60 and {round(bar.get_height(), 6) for bar in bars} == {0.5}


@pytest.mark.parametrize("wait, verdict", [(0.1, "training-bound"), (0.8, "balanced"), (2.0, "generation-bound")])
def test_the_verdict_follows_from_the_time_waited(wait, verdict):
    axes = axes_named(run_figure(history(4, **{"a3po/time/wait": wait})), "Seconds a step")
    assert any(f"waited {wait / 4:.0%} of the time: {verdict}" in text.get_text() for text in axes.texts)


def test_what_was_not_logged_is_left_out_and_named():
    entries = [{"step": 1, "reward": 0.5, "step_time": 1.0}, {"step": 2, "reward": 0.6, "step_time": 1.0}]
    figure = run_figure(entries)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Reward"]
    assert "a3po/staleness/mean" in figure._supxlabel.get_text()


def test_a_run_without_rewards_is_refused():
    with pytest.raises(ValueError, match="no entry with a reward"):
        run_figure([{"loss": 1.0}])
