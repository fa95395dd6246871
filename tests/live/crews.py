"""The kinds of crew as arguments of a Feed, for tests that must hold whoever does the work."""

from __future__ import annotations

from typing import Any, Final

import pytest

from penstock import Feed

CREWS: Final[dict[str, dict[str, Any]]] = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2},
}
each_crew: Final = pytest.mark.parametrize("crew", CREWS)


def feed_of(crew: str, items: Any, load: Any = None, **options: Any) -> Feed:
    """A feed with this kind of crew, and a budget that is enough for small things whatever else the machine does."""
    return Feed(items, load, **{"memory": "512 MiB", "batch_size": 4, **CREWS[crew], **options})


def batches(crew: str, items: Any, load: Any = None, **options: Any) -> list[Any]:
    """All batches of one epoch, kept: copies are allowed, and said to be, so the warning is not the test's business."""
    with feed_of(crew, items, load, **options) as feed:
        return list(_copies(feed))


def drain(feed: Feed, seen: list[Any]) -> None:
    """Add the samples of an epoch to ``seen``, as far as it comes."""
    for batch in feed:
        seen.extend(batch if isinstance(batch, list) else batch.tolist())


def _copies(feed: Feed) -> Any:
    import optree

    for batch in feed:
        yield optree.tree_map(
            lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, batch, none_is_leaf=False, namespace="penstock"
        )
