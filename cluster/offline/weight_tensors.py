"""Tensors of a trainer as a model directory, for the ranks to read."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...proto.errors import InvalidRequest


def write_tensors(tensors: Mapping[str, Any]) -> tempfile.TemporaryDirectory[str]:
    """Return a directory with tensors of torch in a safetensors file. Keep it as long as ranks may read it.

    Raises:
        InvalidRequest: there are none.
    """
    from safetensors.torch import save_file  # torch, which an LLM on several ranks does without

    if not tensors:
        raise InvalidRequest("tensors", "are empty, must be all tensors of the model")
    folder = tempfile.TemporaryDirectory(prefix="quire-weights-")
    stored, storages = {}, set[int]()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in storages:
            own = own.clone()  # safetensors refuses tensors that share memory, as tied weights do
        storages.add(own.untyped_storage().data_ptr())
        stored[name] = own
    save_file(stored, Path(folder.name) / "model.safetensors")
    return folder
