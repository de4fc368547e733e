"""How far the engine's log-probs are from the trainer's, on the tokens that both computed under the same weights.

Guarantees: only fresh tokens count, so the policy's own movement is left out; where caches outlive a publish, the
completions of a single version, whose log-probs a clean forward reproduces, are counted apart from those that span
versions, whose log-probs are the true ones of the sampler but not those of a clean forward.
"""

import torch

from trl_a3po.objectives.stats import Tally


class EngineGap(Tally):
    """`a3po/engine_gap/mean` and `max` of `|lt - lb|`, over fresh tokens; for completions that span versions under
    `kv_on_publish="keep"`, `a3po/kept_cache_gap/mean` and `max`."""

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
        name: str = "engine_gap",
    ) -> "EngineGap":
        """
        Args:
            policy_logps, behavior_logps: `(B, T)`, of the policy as `version` and of the engine.
            behavior_versions: `(B, T)` int, -1 where no policy sampled the token.
            mask: `(B, T)`, 1 at completion tokens.
            version: the policy version of `policy_logps`. A token of this version has staleness 0 in the first
                optimizer step of its batch; in later ones there is none.
            single_version: count only rows all of whose tokens are fresh.
            name: the metric's.
        """
        inside = mask.bool()
        fresh = inside & (behavior_versions == version)
        if single_version:
            fresh &= (fresh == inside).all(1, keepdim=True)
        gap = torch.where(fresh, policy_logps.detach() - behavior_logps, 0.0).abs()
        return cls.of({name: gap}, fresh)

    @classmethod
    def of_kept_caches(
        cls,
        policy_logps: torch.Tensor,
        behavior_logps: torch.Tensor,
        behavior_versions: torch.Tensor,
        mask: torch.Tensor,
        *,
        version: int,
    ) -> "EngineGap":
        """The same over the fresh tokens of rows that also hold older ones: what a kept cache comes to."""
        inside = mask.bool()
        spans = (inside & (behavior_versions != version)).any(1, keepdim=True)
        return cls.of_batch(
            policy_logps,
            behavior_logps,
            behavior_versions,
            inside & spans,
            version=version,
            single_version=False,
            name="kept_cache_gap",
        )

    def _summary(self, column: int) -> dict[str, float]:
        (name,) = self.names
        spread = self._column(column).spread(name)
        return {key: value for key, value in spread.items() if key != f"{name}/min"}
