"""What decides how fast a policy is on given devices, by which the rates of two runs are told to be of two policies.

Guarantees: pure; what a timeline does not say is `None`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class PolicySize:
    """
    Args:
        parameters: numbers of all weights, with those of an adapter.
        trained: those of them that are trained.
        dtype: of the forward pass.
    """

    parameters: int
    trained: int
    dtype: str

    @classmethod
    def of_start(cls, start: dict[str, Any]) -> Self | None:
        """The size that the first line of a timeline holds."""
        policy = start.get("policy")
        return cls(**policy) if isinstance(policy, dict) and set(policy) == {f.name for f in fields(cls)} else None

    def __str__(self) -> str:
        return f"{self.parameters:,} parameters, of which {self.trained:,} are trained, in {self.dtype}"


def check_one_policy(runs: Mapping[str, PolicySize | None]) -> None:
    """Raise `ValueError` if the timelines say that the runs, by their names, have policies of different sizes: the
    rates of two models cannot be fitted together."""
    known = [(name, size) for name, size in runs.items() if size is not None]
    for name, size in known[1:]:
        if size != known[0][1]:
            raise ValueError(
                "The runs train different models, whose rates cannot be fitted together: "
                f"{known[0][0]} has {known[0][1]}, and {name} has {size}. Give runs of one model."
            )
