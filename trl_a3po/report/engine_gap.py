"""How far the engine's log-probs are from the trainer's, on the tokens that both computed under the same weights.

Guarantees: only fresh tokens count, so the policy's own movement is left out; where caches outlive a publish, only
completions of a single version, whose log-probs a clean forward reproduces.
"""

import torch

from trl_a3po.objectives.stats import Tally


class EngineGap(Tally):
    """`a3po/engine_gap/mean` and `max` of `|lt - lb|`, over fresh tokens."""

    @classmethod
    def of_batch(
        cls,
        policy_logps: torch.Tensor,
        behavior_logps: torch.Tensor,
        behavior_versions: torch.Tensor,
        mask: torch.Tensor,
        *,
        version: int,
        single_version: bool,
    ) -> "EngineGap":
        """
        Args:
            policy_logps, behavior_logps: `(B, T)`, of the policy as `version` and of the engine.
            behavior_versions: `(B, T)` int, -1 where no policy sampled the token.
            mask: `(B, T)`, 1 at completion tokens.
            version: the policy version of `policy_logps`. A token of this version has staleness 0 in the first
                optimizer step of its batch; in later ones there is none.
            single_version: count only rows all of whose tokens are fresh.
        """
        inside = mask.bool()
        fresh = inside & (behavior_versions == version)
        if single_version:
            fresh &= (fresh == inside).all(1, keepdim=True)
        gap = torch.where(fresh, policy_logps.detach() - behavior_logps, 0.0).abs()
        return cls.of({"engine_gap": gap}, fresh)

    def _summary(self, column: int) -> dict[str, float]:
        spread = self._column(column).spread("engine_gap")
        return {name: value for name, value in spread.items() if name != "engine_gap/min"}
