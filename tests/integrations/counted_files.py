"""`safe_open` that counts what is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


class Counted:
    """`safe_open` that adds up the bytes read of each tensor in `read`."""

    read: Counter[str]

    def __init__(self, file: Any, name: str | None = None) -> None:
        self.file, self.name = file, name

    @classmethod
    def open(cls, path: Path, framework: str) -> Counted:
        return cls(safe_open(path, framework=framework))

    def __enter__(self) -> Counted:
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_slice(self, name: str) -> Counted:
        return Counted(self.file.get_slice(name), name)

    def get_dtype(self) -> str:
        return self.file.get_dtype()

    def get_shape(self) -> list[int]:
        return self.file.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        found = self.file[index]
        Counted.read[self.name] += found.numel() * found.element_size()
        return found
