"""A run's beginning and end: from a trainer that is about to take its first batch to a queue that generates for it,
and from a checkpoint back to where the run was.

The rooms around know settings, prompts, engines or rewards, and none of them a trainer; here they are put together.
"""

from trl_a3po.session.session import Session

__all__ = ["Session"]
