"""Which items were loaded, told by whatever process did it: through a file that all of them append to."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock import Feed


class Log:
    """A load function that notes what it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def of(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """The same load, with a note of every call."""
        path = self.path

        def logged(item: Any, *out: Any) -> Any:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(fd, f"{item}\n".encode())
            finally:
                os.close(fd)
            return load(item, *out)

        return logged

    def measured(self, feed: Feed) -> Feed:
        """A feed that has seen what loading costs, for which it loads as often as it likes."""
        assert feed.plan.batch_size
        self.take()
        return feed

    def take(self) -> Counter[str]:
        """What was loaded since the last call, and how often."""
        try:
            text = Path(self.path).read_text()
        except FileNotFoundError:
            return Counter()
        os.unlink(self.path)
        return Counter(text.split())
