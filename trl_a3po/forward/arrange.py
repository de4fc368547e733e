"""Which rows of a generation batch share a micro-batch.

Guarantees: rows move only between micro-batches of one optimizer step, and only where the loss is a sum over rows, so
gradients stay the same; every micro-batch keeps its number of rows; completions of one prompt come together as far as
the sizes allow, and long and short rows are spread evenly.
"""

from collections.abc import Sequence

from trl import GRPOConfig

from trl_a3po.distributed.balance import deal_hands


def arrange(costs: Sequence[float], mates: Sequence[Sequence[int]], rows_per_micro_batch: int) -> list[int]:
    """The order of rows, of which each `rows_per_micro_batch` in turn make a micro-batch.

    Args:
        costs: one for each row.
        mates: the rows by prompt; each row once.
    """
    sizes = {len(rows) for rows in mates}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is not None and rows_per_micro_batch % size == 0 and len(costs) % rows_per_micro_batch == 0:
        whole = [sum(costs[row] for row in rows) for rows in mates]
        hands = deal_hands(whole, len(costs) // rows_per_micro_batch)
        return [row for hand in hands for group in hand for row in mates[group]]
    if size is not None and size % rows_per_micro_batch == 0:
        order = []
        for rows in mates:
            hands = deal_hands([costs[row] for row in rows], size // rows_per_micro_batch)
            order += [rows[item] for hand in hands for item in hand]
        return order
    return [row for rows in mates for row in rows]


def micro_batches_of_a_step(steps_per_generation: int, accumulation: int) -> int:
    """How many consecutive micro-batches of a generation batch surely belong to one optimizer step."""
    if steps_per_generation % accumulation == 0:
        return accumulation
    return steps_per_generation if accumulation % steps_per_generation == 0 else 1


def sums_over_rows(args: GRPOConfig) -> bool:
    """Whether the gradient of an optimizer step is the same whatever rows are together in a micro-batch."""
    # Each of the others is a mean or a quantile over the tokens of a micro-batch.
    return (
        args.loss_type != "bnpo"
        and args.top_entropy_quantile == 1.0
        and not args.entropy_coef
        and not args.use_adaptive_entropy
    )
