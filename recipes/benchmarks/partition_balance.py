"""How evenly the rows of a batch are split over processes: cost of the costliest share over the mean share.

    python recipes/benchmarks/partition_balance.py

The cost of a row is `row_cost`: linear in its length, plus a quadratic term for attention. "Before" is the order of
the prompts, "after" is `balanced_order`.
"""

import random
from time import perf_counter

from trl_a3po.distributed.rank_shares import balanced_order, imbalance, row_cost

PROMPT, HIDDEN, GROUPS_PER_PROCESS, GENERATIONS, TRIALS = 128, 1536, 8, 8, 20


def uniform(groups: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randint(1, 1024) for _ in range(GENERATIONS)] for _ in range(groups)]


def geometric(groups: int, rng: random.Random) -> list[list[int]]:
    return [[min(4096, 1 + int(rng.expovariate(1 / 200))) for _ in range(GENERATIONS)] for _ in range(groups)]


def one_straggler(groups: int, rng: random.Random) -> list[list[int]]:
    lengths = [[rng.randint(1, 256) for _ in range(GENERATIONS)] for _ in range(groups)]
    lengths[rng.randrange(groups)][0] = 2560
    return lengths


DISTRIBUTIONS = {
    "uniform, 1 to 1024": uniform,
    "geometric, mean 200": geometric,
    "1 to 256, one of 2560": one_straggler,
}


def measure(name: str, processes: int) -> None:
    before = after = seconds = 0.0
    for trial in range(TRIALS):
        lengths = DISTRIBUTIONS[name](GROUPS_PER_PROCESS * processes, random.Random(trial))
        costs = [[row_cost(PROMPT + length, HIDDEN) for length in group] for group in lengths]
        began = perf_counter()
        order = balanced_order(costs, processes)
        seconds += perf_counter() - began
        before += imbalance([cost for group in costs for cost in group], processes) / TRIALS
        after += imbalance([costs[group][row] for group, row in order], processes) / TRIALS
    print(f"{name}, {processes} processes: {before:.3f} -> {after:.3f}, in {1e3 * seconds / TRIALS:.1f} ms")


def main():
    for name in DISTRIBUTIONS:
        for processes in (2, 4, 8):
            measure(name, processes)


if __name__ == "__main__":
    main()
