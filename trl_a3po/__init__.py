"""Asynchronous RL for language models behind TRL's `GRPOTrainer`, with the A-3PO loss (arXiv 2512.06547).

Importing this package checks the installed TRL's version but does not import it, so an engine's worker process starts
without it; `A3POConfig` and `A3POTrainer` are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from trl_a3po._compat import check_trl_version

if TYPE_CHECKING:
    from trl_a3po.config import A3POConfig
    from trl_a3po.episodes.episode import Episode, EpisodeResult
    from trl_a3po.protocol.records import Group, Rejection
    from trl_a3po.trainer import A3POTrainer

__version__ = "0.1.0.dev0"
__all__ = ["A3POConfig", "A3POTrainer", "Episode", "EpisodeResult", "Group", "Rejection"]

check_trl_version()

if not TYPE_CHECKING:  # a type checker would take any name for one of this package
    _MODULES = {
        "A3POConfig": "trl_a3po.config",
        "A3POTrainer": "trl_a3po.trainer",
        "Episode": "trl_a3po.episodes.episode",
        "EpisodeResult": "trl_a3po.episodes.episode",
        "Group": "trl_a3po.protocol.records",
        "Rejection": "trl_a3po.protocol.records",
    }

    def __getattr__(name):
        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'trl_a3po' has no attribute {name!r}")

    def __dir__():
        return sorted([*globals(), *__all__])
