"""Slots that keep the keys and values of an episode while its tool runs.

Guarantees: a parked slot goes back to the next turn of its own episode, if that begins with the tokens that the slot
holds and shows no new images but those that it adds, and otherwise to whoever needs a slot, the one parked longest
first. While it is parked, it is free for anybody.

A parked slot holds its sequence without the last token, which no forward has read yet. A decode step that happens to
include its row writes behind these tokens and nowhere else.
"""

from collections.abc import Iterable

from trl_a3po.engines.requests import added_images, number_of_images
from trl_a3po.engines.transformers.sequences import DecodedGroup, DecodedRollout


class ParkedSlots:
    """Which slots are parked, and for whom."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # by episode; the one parked longest comes first
        self._rollouts: dict[int, DecodedRollout] = {}  # by slot: the turn that left it

    def __contains__(self, slot: int) -> bool:
        return slot in self._rollouts

    def park(self, slot: int, rollout: DecodedRollout) -> None:
        """Keep what `slot` holds for the next turn of the rollout's episode, if it belongs to one. Tokens of the
        rollout may still be unread."""
        episode = rollout.group.request.episode_of(rollout.number)
        if episode is not None:
            self.drop([episode])
            self._slots[episode], self._rollouts[slot] = slot, rollout

    def take(self, group: DecodedGroup) -> tuple[int, DecodedRollout] | None:
        """Start the next rollout of a later turn in the slot that is parked for it, if there is one."""
        episode = group.request.episode_of(group.next_number)
        slot = None if episode is None else self._slots.pop(episode, None)
        if slot is None:
            return None
        turn = self._rollouts.pop(slot)
        known = (*turn.group.request.prompt_ids, *turn.token_ids)
        new_images = number_of_images(group.request) - number_of_images(turn.group.request)
        if new_images != added_images(group.request) or group.request.prompt_ids[: len(known)] != known:
            return None
        return slot, group.start_next(kept=len(known) - 1)

    def evict(self) -> int:
        """Give up the slot that was parked longest."""
        slot = self._slots.pop(next(iter(self._slots)))
        del self._rollouts[slot]
        return slot

    def drop(self, episodes: Iterable[int]) -> None:
        """No turn of these episodes follows."""
        for episode in episodes:
            if (slot := self._slots.pop(episode, None)) is not None:
                del self._rollouts[slot]

    def clear(self) -> None:
        self._slots.clear()
        self._rollouts.clear()

    def move(self, source: int, target: int) -> None:
        """What was kept in the slot `source` is now in `target`."""
        rollout = self._rollouts[target] = self._rollouts.pop(source)
        episode = rollout.group.request.episode_of(rollout.number)
        assert episode is not None, "only turns of episodes are parked"
        self._slots[episode] = target
