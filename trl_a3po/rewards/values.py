"""The rewards that a reward function returned, as numbers.

Guarantees: one finite number per completion, NaN where the function returned `None`; or else a `RewardError` that
names the function and says what it returned.
"""

import inspect
import math
from typing import Any

from trl_a3po.errors import RewardError


def reward_values(name: str, returned: Any, size: int) -> list[float]:
    """The rewards that the function `name` returned for `size` completions.

    Raises:
        RewardError: `returned` is not one number or `None` per completion.
    """
    if returned is None:
        raise RewardError(
            f"The reward function '{name}' returned None instead of a list: return one number, or None, per "
            "completion."
        )
    if inspect.iscoroutine(returned):
        returned.close()  # or Python warns that nobody has awaited it
        raise RewardError(
            f"The reward function '{name}' returned a coroutine: define the function itself with async def, or return "
            "what the coroutine returns."
        )
    try:
        values = list(returned)
    except TypeError:
        raise RewardError(
            f"The reward function '{name}' returned a {type(returned).__name__}: return a list with one number "
            "per completion."
        ) from None
    except BaseException as error:  # raised by a generator
        raise RewardError(
            f"The reward function '{name}' returned a {type(returned).__name__} that raised {error!r}: return a list "
            "with one number per completion."
        ) from error
    if len(values) != size:
        raise RewardError(
            f"The reward function '{name}' returned {len(values)} rewards for a group of {size} completions: "
            "return exactly one per completion."
        )
    return [_number(name, i, value) for i, value in enumerate(values)]


def _number(name: str, i: int, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str):
        raise RewardError(
            f"The reward function '{name}' returned the string {value!r} for completion {i}: return a number."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last, for a tensor of several elements
        raise RewardError(
            f"The reward function '{name}' returned a {type(value).__name__} for completion {i}: return a number, "
            "or None where the function does not apply."
        ) from error
    if not math.isfinite(number):
        raise RewardError(
            f"The reward function '{name}' returned {number} for completion {i}: return a finite number, or None "
            "where the function does not apply."
        )
    return number
