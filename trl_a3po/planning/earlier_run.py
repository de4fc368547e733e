"""One line of a plan: the time of a step, forecast with the rates of an earlier run in the same `output_dir`.

Guarantees: only reads; where the earlier run cannot tell, the line says why.
"""

from pathlib import Path

from trl_a3po.planning.finished_run import finished_run
from trl_a3po.planning.forecast import Forecast, forecast
from trl_a3po.planning.policy_size import PolicySize
from trl_a3po.planning.rules import Rules
from trl_a3po.planning.simulation import Split
from trl_a3po.report.timeline import NAME, read_timeline


def forecast_from_earlier_run(output_dir: str | Path, rules: Rules, split: Split, policy: PolicySize) -> str | None:
    """The forecast of a run with these rules, devices and policy, in words; `None` if `output_dir` holds no run."""
    timeline = Path(output_dir) / NAME
    if not timeline.is_file():
        return None
    try:
        run = finished_run(read_timeline(timeline))
    except ValueError as error:
        return f"none from the run in output_dir: {error}"
    if run.policy not in (None, policy):
        return f"none from the run in output_dir, which trained another model: {run.policy}; this one has {policy}"
    made = forecast(run.work, run.rates, split, rules)
    return f"{in_words(made)}, at the rates of the run in output_dir, whose steps took {run.step_seconds:.3g} s"


def in_words(made: Forecast) -> str:
    return (
        f"{made.step_seconds:.3g} s per step, of which the trainer waits {made.waiting:.0%}; tokens "
        f"{made.mean_staleness:.1f} optimizer steps stale on average"
    )
