"""The door to the command line: ``penstock`` and ``python -m penstock`` are the same."""

from __future__ import annotations

from penstock._cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
