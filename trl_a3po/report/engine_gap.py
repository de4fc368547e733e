"""How far the engine's log-probs are from the trainer's, on tokens that both computed under the same weights.

Guarantees: only fresh tokens count, so the gap leaves out the policy's own movement. Where caches outlive a publish,
completions of a single version are counted separately from completions that span versions: a clean forward reproduces
the log-probs of the former, while those of the latter are the true log-probs of the sampler but not of a clean
forward.
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
            version: the policy version of `policy_logps`. Tokens have this version only in the first optimizer step of
                their batch, where their staleness is 0.
            single_version: count only rows whose tokens are all fresh.
            name: of the metric.
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
        """The same over the fresh tokens of rows that also hold older tokens, which shows the effect of kept
        caches."""
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
