"""Which weights the next update holds: those that training changes, and those that something else has changed.

Guarantees: a weight that required a gradient once is sent with every update from then on, so that a layer that is
frozen later keeps its last values in the engine; a frozen weight is sent when its fingerprint is another than that of
its values in the engine.
"""

import logging
from collections.abc import Callable, Mapping

from trl_a3po.publish.fingerprint import fingerprint
from trl_a3po.publish.weight_sources import WeightSource

logger = logging.getLogger(__name__)


class ChangedWeights:
    """
    Args:
        sources: the weights as the engine is started with them.
        check_frozen: called with the names of frozen weights that have changed, before they are sent; it raises where
            the engine cannot take them.
    """

    def __init__(self, sources: Mapping[str, WeightSource], check_frozen: Callable[[set[str]], None] = lambda _: None):
        self._trained = {name for name, source in sources.items() if source.trained}
        self._in_engine = fingerprint(self._frozen(sources))
        self._check_frozen = check_frozen
        self._warned = False

    def names(self, sources: Mapping[str, WeightSource]) -> set[str]:
        """The names of the weights to send now, which the engine then has.

        Raises:
            ValueError: the engine cannot take a frozen weight that has changed.
        """
        self._trained |= {name for name, source in sources.items() if source.trained}
        now = fingerprint(self._frozen(sources))
        changed = now.changed(self._in_engine)
        if changed:
            self._check_frozen(changed)
            self._warn(changed)
        self._in_engine = now
        return self._trained | changed

    def _frozen(self, sources: Mapping[str, WeightSource]) -> dict[str, WeightSource]:
        return {name: source for name, source in sources.items() if name not in self._trained}

    def _warn(self, changed: set[str]) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "Weights that are frozen have changed during training (%s, %d in all): they are sent to the engine "
                "again. Something other than the optimizer has written to them, such as a merge of an adapter.",
                min(changed),
                len(changed),
            )
