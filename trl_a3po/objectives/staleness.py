"""How old a token is, and how far the proximal policy moves because of it.

Guarantees: staleness is never negative, and a version that cannot be true raises.
"""

from typing import Literal

import torch

from trl_a3po.objectives.inputs import check_option

Fresh = Literal["behavior", "policy"]
FRESH = ("behavior", "policy")


def token_staleness(behavior_versions: torch.Tensor, version: int) -> torch.Tensor:
    """Staleness `d` of every token: `version` minus the version of the policy that sampled it.

    Args:
        behavior_versions: `(B, T)` integers, the version stamped on each token; -1 where no policy sampled it.
        version: the policy version when the generation batch was taken, in optimizer steps.

    Returns:
        `(B, T)` integers of the same dtype; 0 where the stamp is -1.

    Raises:
        ValueError: a stamp is newer than `version`, or below -1.
    """
    impossible = (behavior_versions > version) | (behavior_versions < -1)
    if impossible.any():
        position = tuple(impossible.nonzero()[0].tolist())
        stamp = int(behavior_versions[position])
        why = (
            "no token can come from a policy newer than the trainer's" if stamp > version else "no version is below -1"
        )
        raise ValueError(
            f"behavior_versions holds {stamp} at position {position} while the policy version is {version}: {why}. "
            "Stamp each token with the version that sampled it, or -1 where no policy did."
        )
    return torch.where(behavior_versions == -1, 0, version - behavior_versions)


def interpolation_weight(staleness: torch.Tensor, fresh: Fresh = "behavior") -> torch.Tensor:
    """The weight of the *current* policy in the proximal one: `(d - 1)/d`.

    The paper writes `α = 1/d` for the weight of the behavior policy, the complement of this one (arXiv 2512.06547).

    Args:
        staleness: `(B, T)` integers.
        fresh: the proximal policy at `d = 0`: `"behavior"` gives weight 0, an ordinary trust region around the policy
            that sampled; `"policy"` gives 1, so that fresh tokens have no trust region.

    Returns:
        `(B, T)` float32 in [0, 1].
    """
    return interpolation_weight_as(torch.float32, staleness, fresh)


def interpolation_weight_as(dtype: torch.dtype, staleness: torch.Tensor, fresh: Fresh) -> torch.Tensor:
    """`interpolation_weight` in the precision of the log-probs it will weigh."""
    check_option("fresh", fresh, FRESH)
    d = staleness.to(dtype)
    weight = (d - 1).clamp(min=0) / d.clamp(min=1)
    return weight if fresh == "behavior" else torch.where(d == 0, 1, weight)
