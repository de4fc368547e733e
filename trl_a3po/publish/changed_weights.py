"""Which weights the next update holds: those that training changes, and those that something else has changed.

Guarantees: a weight that required a gradient once is sent with every update from then on, so that a layer that is
frozen later keeps its last values in the engine; a frozen weight is sent when its fingerprint is another than that of
its values in the engine. Engines may read frozen weights where the trainer has them: a frozen weight that is about to
be sent is moved in the trainer first, so that what is written to it from then on is not read before it is published.
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
        read_in_place: whether engines may read frozen weights where they are.
    """

    def __init__(
        self,
        sources: Mapping[str, WeightSource],
        check_frozen: Callable[[set[str]], None] = lambda _: None,
        *,
        read_in_place: bool = False,
    ):
        self._trained = {name for name, source in sources.items() if source.trained}
        self._in_engine = fingerprint(self._frozen(sources))
        self._read_in_place = set(self._frozen(sources)) if read_in_place else set()
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
        sent = self._trained | changed
        if self._read_in_place & sent:
            for name in self._read_in_place & sent:
                _move(sources[name])
            self._read_in_place -= sent
            now = fingerprint(self._frozen(sources))
        self._in_engine = now
        return sent

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


def _move(source: WeightSource) -> None:
    """Give a weight that is not made of others memory of its own."""
    if source.template is None:
        weight = source.tensors[0]
        weight.data = weight.data.clone()
