"""All ranks of a job use the same batch size: the smallest that any of them found. Never imports torch itself."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Final

from penstock._core.errors import PenstockError, said
from penstock._core.fit import Asked

__all__ = ["smallest"]

# How often this process asked: ranks that make the same feeds in the same order ask for the same thing.
_times: Final = itertools.count()
# A feed that begins anew after an interruption does not ask again: the other ranks have no reason to answer.
_agreed: weakref.WeakKeyDictionary[Asked, int] = weakref.WeakKeyDictionary()


def smallest(rows: int, asked: Asked) -> int:
    """The smallest of what all ranks give here; ``rows`` itself where ``torch.distributed`` is not in use.

    Goes through the store of the job and not through a collective: a rank may come here while others are still doing
    something else together.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return rows
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if world == 1:
        return rows
    if asked in _agreed:
        return min(rows, _agreed[asked])
    store = torch.distributed.distributed_c10d._get_default_store()
    name = f"penstock/batch/{next(_times)}"
    store.set(f"{name}/{rank}", str(rows))
    try:
        _agreed[asked] = min(int(store.get(f"{name}/{other}")) for other in range(world))
    except (RuntimeError, torch.distributed.DistError) as error:  # the store's way to say that nobody came
        raise PenstockError(
            f"not all {world} ranks planned this feed, so they cannot agree on a batch size: every rank must make the "
            f"same feeds and use them ({said(error)}); or give batch_size as a number"
        ) from error
    return _agreed[asked]
