"""The session of a run: what `A3POTrainer` builds when training starts, and closes when it ends.

The other rooms each know settings, prompts, engines or rewards, but no trainer. Here they are put together: `build_*`
make the engine, the policy, the queue and the reward functions of a trainer; `session` runs them; `saving` and
`resuming` write a run into a checkpoint and read it back; `checkpoint_hooks` and `current_batch` are parts of the
trainer.
"""

from trl_a3po.session.session import Session

__all__ = ["Session"]
