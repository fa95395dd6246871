"""Which words of a feed an interface above it must not use."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["assert_own_words"]

# Arguments of a feed that an interface calls otherwise, or does not have.
FOREIGN: Final = re.compile(
    r"\b(memory|batch_size|executor|start_method|cast|timeout|model|load)\b(?==)|"
    r"\b(device_memory|samples_per_item|num_workers|collate|collated|collate_fn|on_error)\b|\bin load\b"
)


def assert_own_words(error: BaseException, own: frozenset[str] = frozenset()) -> None:
    """Nothing of what an error says is about an argument that is not here, apart from those in ``own``."""
    foreign = [found[0] for found in FOREIGN.finditer(str(error)) if found[0] not in own]
    assert not foreign, f"{foreign} in: {error}"
