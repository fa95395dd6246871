"""The door to PyTorch: batches as tensors that share the slot's memory. Imports torch when it is used."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["from_array"]


def from_array(array: Any) -> Any:
    """A CPU tensor over the same memory, which keeps the batch's lease alive; texts, dates and records stay arrays."""
    name = array.dtype.name
    if name.startswith(("bfloat16", "float8")):  # torch knows the type but not numpy's name for it: pass the bits
        return torch.from_numpy(array.view(f"int{8 * array.itemsize}")).view(getattr(torch, name))
    return array if array.dtype.kind in "USMmV" else torch.from_numpy(array)
