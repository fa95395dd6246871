"""Where each slot lies in the arena and how large it is. Runs in the parent.

Slots begin equal. Those of batches that are collated may need more than was planned: such a slot moves to a larger
place at the end of the arena, and its old pages go back to the system. All of them together never take more than
was planned for slots plus ``spare``, the part of the budget that nothing else may use.
"""

from __future__ import annotations

from penstock._core.arena import AnyArena
from penstock._core.layout import PAGE

__all__ = ["Regions"]


class Regions:
    """Offset and size of every slot."""

    def __init__(self, arena: AnyArena, slots: int, slot_bytes: int, spare_bytes: int) -> None:
        self._arena = arena
        self.slot_bytes = slot_bytes
        self._most = slots * slot_bytes + spare_bytes
        base = arena.extend(slots * slot_bytes)
        self._places = [(base + i * slot_bytes, slot_bytes) for i in range(slots)]

    def __getitem__(self, slot: int) -> tuple[int, int]:
        """Offset and size of a slot."""
        return self._places[slot]

    @property
    def room(self) -> int:
        """Bytes that slots may still grow by."""
        return self._most - sum(size for _, size in self._places)

    def enlarged(self, slot: int) -> bool:
        """Whether a slot is larger than planned."""
        return self._places[slot][1] > self.slot_bytes

    def enlarge(self, slot: int, size: int) -> bool:
        """Make a slot hold ``size`` bytes, with something to spare if there is room; False if there is none."""
        room = self.room + self._places[slot][1]
        wanted = -(-size // PAGE) * PAGE
        if wanted > room:
            return False
        self._place(slot, min(room // PAGE * PAGE, wanted * 5 // 4 // PAGE * PAGE))
        return True

    def exchange(self, one: int, other: int) -> None:
        """Two slots take each other's place; neither holds anything."""
        self._places[one], self._places[other] = self._places[other], self._places[one]

    def give_up(self, slot: int) -> None:
        """A slot is out of use: its memory serves others."""
        self._place(slot, 0)

    def restore(self, slot: int) -> bool:
        """Let a slot be as large as planned again, if there is room."""
        if self.slot_bytes > self.room + self._places[slot][1]:
            return False
        self._place(slot, self.slot_bytes)
        return True

    def add(self) -> None:
        """One more slot, because consumers hold all others; what they hold is theirs."""
        self._most += self.slot_bytes
        self._places.append((self._arena.extend(self.slot_bytes), self.slot_bytes))

    def remove(self, slot: int) -> None:
        """A slot that was added is not needed any more."""
        self._most -= self._places[slot][1]
        self._place(slot, 0)

    def _place(self, slot: int, size: int) -> None:
        offset, old = self._places[slot]
        if old:
            self._arena.discard(offset, old)
        self._places[slot] = (self._arena.extend(size) if size else offset, size)
