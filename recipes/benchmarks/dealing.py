"""How evenly the rows of a batch are dealt to processes: cost of the costliest over the mean, before and after.

    python recipes/benchmarks/dealing.py

The cost of a row is `row_cost`: its length, and the square of it for attention. "Before" is the order of the prompts.
"""

import random
from time import perf_counter

from trl_a3po.distributed.rank_shares import deal, imbalance, row_cost

PROMPT, HIDDEN, GROUPS_A_PROCESS, GENERATIONS, TRIALS = 128, 1536, 8, 8, 20


def lengths(kind: str, groups: int, noise: random.Random) -> list[list[int]]:
    if kind == "uniform, 1 to 1024":
        return [[noise.randint(1, 1024) for _ in range(GENERATIONS)] for _ in range(groups)]
    if kind == "geometric, mean 200":
        return [[min(4096, 1 + int(noise.expovariate(1 / 200))) for _ in range(GENERATIONS)] for _ in range(groups)]
    drawn = [[noise.randint(1, 256) for _ in range(GENERATIONS)] for _ in range(groups)]
    drawn[noise.randrange(groups)][0] = 2560
    return drawn


def main():
    for kind in ("uniform, 1 to 1024", "geometric, mean 200", "1 to 256, one of 2560"):
        for processes in (2, 4, 8):
            before = after = seconds = 0.0
            for trial in range(TRIALS):
                drawn = lengths(kind, GROUPS_A_PROCESS * processes, random.Random(trial))
                costs = [[row_cost(PROMPT + length, HIDDEN) for length in group] for group in drawn]
                began = perf_counter()
                order = deal(costs, processes)
                seconds += perf_counter() - began
                before += imbalance([cost for group in costs for cost in group], processes) / TRIALS
                after += imbalance([costs[group][row] for group, row in order], processes) / TRIALS
            print(
                f"{kind}, {processes} processes: {before:.3f} -> {after:.3f}, dealt in {1e3 * seconds / TRIALS:.1f} ms"
            )


if __name__ == "__main__":
    main()
