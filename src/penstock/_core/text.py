"""Text as bytes: which encodings there are, where lines end, which are blank, and how bytes become lines. Pure.

Lines end as Python's ``open`` has it: with a line feed, a carriage return, or both. So they can be found in the bytes
without decoding them, at the speed of memory, and a file can be cut anywhere. Runs in the parent and in workers.
"""

from __future__ import annotations

import codecs
import dataclasses
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock._core.spec import Array

__all__ = ["WHITE", "Encoding", "Form", "blank", "line_ends", "split_lines"]

LF: Final = 10
CR: Final = 13
WHITE: Final = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Every character that ``str.isspace`` takes for white space; a test holds it to that."""

_UNITS: Final = {"utf-16": 2, "utf-16-le": 2, "utf-16-be": 2, "utf-32": 4, "utf-32-le": 4, "utf-32-be": 4}
_MARKS: Final = {
    "utf-8-sig": ((codecs.BOM_UTF8, "utf-8"),),
    "utf-16": ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")),
    "utf-32": ((codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be")),
}
_UNMARKED: Final = {
    "utf-8-sig": "utf-8",
    "utf-16": "utf-16-le" if np.little_endian else "utf-16-be",
    "utf-32": "utf-32-le" if np.little_endian else "utf-32-be",
}
# What a character means here depends on all that came before it, so that a file cannot be read from the middle.
_STATEFUL: Final = ("utf-7", "hz", "iso2022")


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How the text of one file is read: its codec, where it starts, and the units that it is made of."""

    codec: str
    start: int = 0
    """Bytes of the mark that stands before the text."""

    @property
    def unit(self) -> int:
        """Bytes of a unit: no line ends inside one."""
        return _UNITS.get(self.codec, 1)

    @property
    def dtype(self) -> np.dtype[Any]:
        """A unit as a number."""
        return np.dtype((">" if self.codec.endswith("be") and self.unit > 1 else "<") + f"u{self.unit}")


class Encoding:
    """An encoding by its name, checked: text in it can be cut at the ends of lines."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f'encoding={name!r} must be the name of one, such as "utf-8"')
        try:
            "\n".encode(name)  # unlike codecs.lookup it refuses what makes no text: rot13, base64
            self.name = codecs.lookup(name).name
        except LookupError as error:
            raise ValueError(f'encoding={name!r} is not known ({error}): give one such as "utf-8"') from None
        if self.name.startswith(_STATEFUL):
            raise ValueError(
                f"encoding={name!r} cannot be read from the middle of a file, since it depends on what came before: "
                "convert the files to utf-8"
            )
        self.unit = _UNITS.get(self.name, 1)
        if self.name not in _MARKS and self.unit == 1 and ("\n".encode(name), "\r".encode(name)) != (b"\n", b"\r"):
            raise ValueError(f"encoding={name!r} has other line ends than ASCII: convert the files to utf-8")
        self.marked = self.name in _MARKS
        """Whether the first bytes of a file say how it is to be read."""

    def __reduce__(self) -> tuple[type[Encoding], tuple[str]]:
        return Encoding, (self.name,)

    def form(self, head: bytes) -> Form:
        """How a file that begins with these bytes (four are enough) is read."""
        if not self.marked:
            return Form(self.name)
        for mark, codec in _MARKS[self.name]:
            if head.startswith(mark):
                return Form(codec, len(mark))
        return Form(_UNMARKED[self.name])

    @cached_property
    def edges(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """For each value of a unit whether white space may begin with it, and whether it may end with it.

        Nearly every line begins or ends with something else: only the others have to be decoded to see if they are
        blank. Values above the table count as its last entry.
        """
        tables = np.zeros((2, 256 if self.unit == 1 else 2**16), np.bool_)
        if self.unit > 1:
            tables[:, [ord(char) for char in WHITE]] = True
            return tables[0], tables[1]
        name = _UNMARKED.get(self.name, self.name)
        for char in WHITE:
            data = char.encode(name, "ignore")
            if data:
                tables[0, data[0]] = tables[1, data[-1]] = True
        for value in range(256):  # a code page may have the same character twice
            if bytes([value]).decode(name, "replace").isspace():
                tables[:, value] = True
        return tables[0], tables[1]


def units_of(data: Array, form: Form) -> Array:
    """Bytes as units; what does not fill one at the end of a broken file is left out."""
    return data[: len(data) // form.unit * form.unit].view(form.dtype)


def line_ends(data: Array, form: Form, *, final: bool) -> npt.NDArray[np.int64]:
    """Where the next line would begin, for each end of a line in these bytes.

    Bytes must start with a whole unit. A carriage return at the very end counts only if nothing follows (``final``):
    otherwise it may be half of an end.
    """
    units = units_of(data, form)
    ends = np.flatnonzero(units == LF)
    if (returns := units == CR).any():
        places = np.flatnonzero(returns)
        if not final and places[-1] == len(units) - 1:
            places = places[:-1]
        alone = units[np.minimum(places + 1, len(units) - 1)] != LF
        ends = np.sort(np.concatenate((ends, places[alone])))
    return (ends + 1) * form.unit


def blank(
    data: Array, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], form: Form, encoding: Encoding
) -> npt.NDArray[np.bool_]:
    """Which of these lines (their ends included) are nothing but white space. What cannot be decoded is not."""
    found = np.zeros(len(starts), np.bool_)
    units = units_of(data, form)
    whole = (stops - starts) % form.unit == 0
    first, last = starts // form.unit, stops // form.unit - 1
    begins, finishes = encoding.edges
    top = len(begins) - 1
    maybe = np.flatnonzero(whole)
    maybe = maybe[begins[np.minimum(units[first[maybe]], top)]]
    if not len(maybe):
        return found
    # Back over the line's end, so that indented lines are seen not to be blank by how they finish.
    at, begin = last[maybe], first[maybe]
    at = at - (units[at] == LF)
    at = at - ((at >= begin) & (units[at] == CR))
    empty = at < begin
    found[maybe[empty]] = True
    rest = ~empty & finishes[np.minimum(units[at], top)]
    for line in maybe[rest].tolist():
        found[line] = data[starts[line] : stops[line]].tobytes().decode(form.codec, "replace").isspace()
    return found


def split_lines(text: str, *, strip: bool, keep_blank: bool) -> list[str]:
    """The lines of a text that ends where a line ends, as samples."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()  # behind the last end there is no further line
    if strip:
        return [line.strip() for line in lines] if keep_blank else [kept for line in lines if (kept := line.strip())]
    return lines if keep_blank else [line for line in lines if line and not line.isspace()]
