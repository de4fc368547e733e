"""The best split of a number of GPUs between training and generation.

Guarantees: pure; every split that is returned gives each trainer the same number of completions of a micro-batch, and
fits into memory where that is known; the first split is the fastest of those that were simulated.
"""

from collections.abc import Callable
from dataclasses import replace

from trl_a3po.planning.forecast import Forecast, bound_seconds, forecast
from trl_a3po.planning.rates import Rates
from trl_a3po.planning.rules import Rules, groups_that_fill
from trl_a3po.planning.simulation import Split
from trl_a3po.planning.workload import Workload

SIMULATED = 5


def splits(gpus: int, per_engine: int, slots: int, rules: Rules) -> list[Split]:
    """Every way to share out `gpus` GPUs, with `per_engine` GPUs for each engine, in which each trainer trains the
    same number of completions of a take.

    Raises:
        ValueError: there is none.
    """
    if per_engine < 1:
        raise ValueError(f"gpus_per_engine is {per_engine}, but an engine needs at least 1 GPU.")
    completions = rules.completions_per_take
    found = [
        Split(trainers, (gpus - trainers) // per_engine, slots)
        for trainers in range(1, gpus - per_engine + 1)
        if completions % trainers == 0 and (gpus - trainers) % per_engine == 0
    ]
    if not found:
        raise ValueError(
            f"{gpus} GPUs cannot be shared out: each engine needs {per_engine}, at least one GPU must train, and the "
            f"number of GPUs that train must divide the {completions} completions of a batch. Change the number of "
            "GPUs or generation_batch_size."
        )
    return found


def rules_of_split(rules: Rules, split: Split) -> Rules:
    """The rules, with as many groups in flight as the slots of all engines need (`session.build_engine`)."""
    if rules.max_in_flight is None:
        return rules
    return replace(rules, max_in_flight=groups_that_fill(split.slots * split.engines, rules.num_generations))


def best_splits(
    work: Workload,
    rates: Rates,
    rules: Rules,
    candidates: list[Split],
    fits: Callable[[Split], bool] = lambda split: True,
) -> list[Forecast]:
    """Forecasts of the most promising splits, the fastest first. Of equally fast ones, that with fewer engines is
    first, whose tokens are fresher.

    Raises:
        ValueError: no split fits.
    """
    fitting = [split for split in candidates if fits(split)]
    if not fitting:
        raise ValueError("No split fits into the memory of the GPUs: use more GPUs, ZeRO-3, LoRA or smaller batches.")
    fitting.sort(key=lambda split: bound_seconds(work, rates, split, rules_of_split(rules, split)))
    simulated = [forecast(work, rates, split, rules_of_split(rules, split)) for split in fitting[:SIMULATED]]
    return sorted(simulated, key=lambda made: (round(made.step_seconds, 3), made.split.engines))
