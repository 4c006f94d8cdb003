"""The safetensors files of a `transformers` checkpoint: tensors by name, read when they are indexed.

What the tensors mean together: `packings.py`. Which of them are one block's experts: `block_experts.py`.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from epmoe.quant.stored import Stored

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointFiles(contextlib.ExitStack):
    """Tensors by name, from files that stay open until the context ends.

    Args:
        directory: holds `model.safetensors`, or an index and the files that it names.
        stored: how weights are stored there.

    Raises:
        ValueError: no checkpoint there, or a file that the index names is missing.
    """

    def __init__(self, directory: Path, stored: Stored | None = None) -> None:
        super().__init__()
        self.directory, self.stored = directory, stored or Stored()
        self._open: dict[Path, Any] = {}
        index = directory / INDEX
        if index.is_file():
            self.names = {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif (directory / SINGLE).is_file():
            self.names = dict.fromkeys(self._file(directory / SINGLE).keys(), directory / SINGLE)
        else:
            raise ValueError(f"{directory}: neither {INDEX} nor {SINGLE} is there; must be a checkpoint of safetensors")
        for path in sorted(set(self.names.values())):
            if not path.is_file():
                raise ValueError(f"{path} is missing, which {INDEX} names")

    def slice(self, name: str) -> Any:
        """The tensor as safetensors gives it before reading: index it to read those bytes."""
        if name not in self.names:
            raise ValueError(f"{self.directory}: tensor {name!r} is missing")
        return self._file(self.names[name]).get_slice(name)

    def kind(self, name: str) -> str:
        """The dtype of a tensor as safetensors calls it: `F8_E4M3`, `U8`, `I32`, `F16`, ..."""
        return str(self.slice(name).get_dtype())

    def raw(self, name: str, expert: int | None = None) -> Tensor:
        """A tensor as it is stored, or one expert's part of it."""
        found = self.slice(name)
        return found[...] if expert is None else found[expert]

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self.enter_context(safe_open(path, framework="pt"))
        return self._open[path]
