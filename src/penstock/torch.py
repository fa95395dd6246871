"""The door to PyTorch: batches as tensors that share the slot's memory. Imports torch when it is used."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["from_array"]


def from_array(array: Any) -> torch.Tensor:
    """A CPU tensor over the same memory; it keeps the batch's lease alive."""
    if array.dtype.name == "bfloat16":  # torch knows the type but not numpy's name for it: pass the bits
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
