"""Every setting of a run: `A3POConfig`, the checks of its values, and what they resolve to."""

from trl_a3po.config.a3po_config import A3POConfig

__all__ = ["A3POConfig"]
