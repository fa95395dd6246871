"""What the engine says, in the words of an interface above it.

The engine's errors advise with the arguments of a ``Feed``. An interface that calls them otherwise, or lacks them, has
them said in its own words here, where they leave it; kind, attributes, cause and notes stay. A budget's errors hold
nothing but the library's own text, and are searched as a whole. In others stand names of items and messages of user
code, which must stay as they are: there a pattern begins with ``^`` or ends with ``$``, and says all that is between.

Runs in the parent.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock import BudgetError, BudgetWarning, LoadError, PenstockError
from penstock._core.patience import users_level

__all__ = ["USE_OTHER", "Wording"]

USE_OTHER: Final = r"[,;] or use ((, | or )?(executor|num_workers|start_method)=['\"\w]+)+$"
"""How the engine ends where loading without worker processes would help."""

Phrases = tuple[tuple[str, str], ...]
"""Patterns and what stands in their place, one after the other."""
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Wording:
    """How an interface says what the engine does."""

    budget: Phrases
    """For errors and warnings of the budget, anywhere in them."""
    load: Phrases
    """For what went wrong with an item, at its beginning or end."""
    start: Phrases
    """For all else: what cannot be sent to workers, or not be started; at its beginning or end."""

    def __post_init__(self) -> None:
        for pattern, _ in (*self.load, *self.start):
            assert pattern.startswith("^") or pattern.endswith("$"), f"{pattern} would touch what others wrote"

    def tell(self, error: BaseException) -> None:
        """Have an error say it in these words."""
        if error.args and isinstance(error.args[0], str):
            kind = self.budget if isinstance(error, BudgetError) else self.start
            error.args = (_said(error.args[0], self.load if isinstance(error, LoadError) else kind), *error.args[1:])

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """What is raised inside is said in these words."""
        try:
            yield
        except (PenstockError, TypeError, ValueError) as error:
            self.tell(error)
            raise

    def warned(self, make: Callable[[], Made]) -> Made:
        """What ``make`` gives; it may warn about the budget, which is said in these words at the user's line."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = make()
        for one in caught:
            text, about_budget = str(one.message), issubclass(one.category, BudgetWarning)
            warnings.warn(_said(text, self.budget) if about_budget else text, one.category, stacklevel=users_level())
        return made


def _said(text: str, phrases: Phrases) -> str:
    for pattern, other in phrases:
        text = re.sub(pattern, other, text, flags=re.DOTALL)
    return text
