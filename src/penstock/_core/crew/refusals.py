"""What the system refuses a crew (a process, a thread, a descriptor, a folder), in words that help. Runs in the parent.

It only finds words: whoever met the refusal decides whether it is the end.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from penstock._core import machine
from penstock._core.errors import PenstockError, said

__all__ = ["refused"]

_ELSE: Final = "or use executor='thread' or num_workers=0"
# What os.fork and thread creation say when there may be no more of them.
_NO_MORE: Final = (errno.EAGAIN, errno.ENOMEM)


def refused(error: BaseException) -> BaseException:
    """The error to raise in place of one of the system's; any other as it is."""
    if isinstance(error, PenstockError) or (not isinstance(error, OSError | EOFError) and not _no_thread(error)):
        return error
    told = PenstockError(_words(error))
    told.__cause__ = error
    return told


def _words(error: BaseException) -> str:
    code = error.errno if isinstance(error, OSError) else None
    limits = _limits()
    if code == errno.EMFILE:
        return (
            f"this process may have {_most(limits.get('open files'))} files open at once (ulimit -n) and has no room "
            "left for those that lead to its workers: raise the limit, close files that are not needed, give a smaller "
            f"num_workers, {_ELSE}"
        )
    if code == errno.ENFILE:
        return f"the whole system has as many files open as it allows: close some, give a smaller num_workers, {_ELSE}"
    if code in _NO_MORE or _no_thread(error):
        return (
            f"the system refuses another process or thread ({said(error)}): this user may have "
            f"{_most(limits.get('processes'))} of them (ulimit -u), a container perhaps fewer (pids.max): raise the "
            f"limit, give a smaller num_workers, {_ELSE if not _no_thread(error) else 'or use num_workers=0'}"
        )
    try:
        os.getcwd()
    except OSError:
        return (
            "the workers cannot be started, because the folder that this process is in was deleted: os.chdir() to one "
            f"that is there, {_ELSE}"
        )
    return f"the workers cannot be started: the system says {said(error)}. Put that right, {_ELSE}"


def _limits() -> dict[str, machine.Rlimit]:
    try:
        return machine.rlimits()
    except ImportError:  # with no descriptor left not even a module can be read
        return {}


def _most(limit: machine.Rlimit | None) -> str:
    return "so many" if limit is None else "any number of" if limit.soft is None else str(limit.soft)


def _no_thread(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "new thread" in str(error)
