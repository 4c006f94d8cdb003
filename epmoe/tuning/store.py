"""Measured configurations on disk, which the configuration functions in `ops/` ask before their own rules. Stands
beside the path of a token.

    epmoe/tuning/<device>/triton-<x.y>/<op>.json        the first part is EPMOE_TUNING_DIR where that is set

A file is a JSON list of entries, one a line:

    {"L": 32, "N": 4096, "K": 7168, "dtype": "bfloat16", "scheme": "none", "rows": 16,
     "kind": "FewRowsConfig", "config": {"block_t": 32, ...}, "us": 431.2, "rule_us": 440.9, ...}

`kind` is the class that `config` fills, and with it the kernel that runs. An entry answers for as many expected rows
per expert as it was measured with, and for up to twice or half as many where no other is nearer; beyond, and for every
other (L, N, K, dtype, scheme), the rules hold. A configuration decides speed and never which numbers are multiplied;
where kernels add in another order, as a split reduction does, last bits differ.

L local experts, N weight rows of an expert (2I for a gated GEMM1), K the width they reduce.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

SHIPPED = Path(__file__).parent
VARIABLE = "EPMOE_TUNING_DIR"
OPS = (
    *("grouped_gemm", "grouped_gemm_act", "scaled_grouped_gemm", "scaled_grouped_gemm_act"),
    *("narrow_grouped_gemm", "narrow_grouped_gemm_act", "grouped_wgrad"),
)
KINDS = ("GemmConfig", "FewRowsConfig", "ScaledConfig", "NarrowConfig", "WgradConfig")
REACH = 2  # how many times as many rows, or as few, an entry answers for

Config = TypeVar("Config")


class Key(NamedTuple):
    """What entries are told apart by, beside their rows."""

    L: int
    N: int
    K: int
    dtype: str
    scheme: str


class Entry(NamedTuple):
    """One line of a file."""

    rows: int
    kind: str
    config: Mapping[str, int | bool]
    where: str  # file and line, for errors

    def of(self, kind: type[Config]) -> Config | None:
        """The configuration, or None if it is another kernel's.

        Raises:
            ValueError: its fields are not those of `kind`, naming the file and the line.
        """
        if self.kind != kind.__name__:
            return None
        fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for name, value in self.config.items():
            if fields.get(name) != type(value).__name__:
                right = f"must be {fields[name]}" if name in fields else f"is no field of {self.kind}"
                raise ValueError(f"{self.where}: config.{name}={value!r}: {right}")
        try:
            return kind(**self.config)
        except TypeError as error:
            raise ValueError(f"{self.where}: config does not make a {self.kind}: {error}") from error


@functools.lru_cache(maxsize=8192)
def lookup(
    op: str, device: torch.device, L: int, n: int, k: int, dtype: torch.dtype, scheme: str, rows: int
) -> Entry | None:
    """The entry for `rows` expected rows per expert, or None: nobody measured anything near.

    Args:
        op: one of `OPS`.
        dtype: of the rows that the op multiplies: eight bits where they are quantized.
        scheme: of rows and weights, or of narrow weights; `none` without.

    Raises:
        ValueError: the file that should say is not what it must be, naming it and the line.
    """
    assert op in OPS
    folder = folder_for(device)
    if folder is None:
        return None
    measured = load(folder / f"{op}.json").get(Key(L, n, k, str(dtype).removeprefix("torch."), scheme), ())
    # as far from two: the one for more rows, since experts seldom get the same number
    nearest = min(measured, key=lambda entry: (_ratio(entry.rows, rows), -entry.rows), default=None)
    return nearest if nearest is not None and _ratio(nearest.rows, rows) <= REACH else None


def tuned(
    kind: type[Config],
    op: str,
    device: torch.device,
    L: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    scheme: str,
    rows: int,
) -> Config | None:
    """`lookup`'s configuration if there is one and it is a `kind`, else None."""
    entry = lookup(op, device, L, n, k, dtype, scheme, rows)
    return None if entry is None else entry.of(kind)


def _ratio(a: int, b: int) -> float:
    return max(a / b, b / a)


def folder_for(device: torch.device) -> Path | None:
    """Where the files for `device` and the installed Triton are, whether they exist or not; None where nothing is
    tuned: on a CPU, or without Triton."""
    version = _triton_version()
    if device.type != "cuda" or version is None:
        return None
    root = Path(os.environ.get(VARIABLE) or SHIPPED)
    return root / slug(torch.cuda.get_device_name(device)) / f"triton-{version}"


def slug(name: str) -> str:
    """A device's name in lower case and dashes: `nvidia-h200`."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


@functools.cache
def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return ".".join(triton.__version__.split(".")[:2])


@functools.cache
def load(path: Path) -> Mapping[Key, tuple[Entry, ...]]:
    """The entries of a file, none if it does not exist; read once and for all.

    Raises:
        ValueError: it is not a list of entries, or two are for the same problem; names the file and the line.
    """
    found: dict[Key, tuple[Entry, ...]] = {}
    for line, raw in read(path):
        where = f"{path}, line {line}"
        key, entry = _parsed(raw, where)
        for other in found.get(key, ()):
            if other.rows == entry.rows:
                raise ValueError(f"{where}: {key} and rows={entry.rows} stand twice, also in {other.where}")
        found[key] = (*found.get(key, ()), entry)
    return types.MappingProxyType(found)


_FIELDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("L", "N", "K", "rows"), lambda value: type(value) is int and value > 0, "an int > 0"),
    (("dtype", "scheme", "kind"), lambda value: isinstance(value, str), "a string"),
    (("config",), lambda value: isinstance(value, dict), "an object"),
)


def _parsed(raw: Mapping[str, Any], where: str) -> tuple[Key, Entry]:
    for names, fits, right in _FIELDS:
        for name in names:
            if not fits(raw.get(name)):
                raise ValueError(f"{where}: {name}={raw.get(name)!r}: must be {right}")
    if raw["kind"] not in KINDS:
        raise ValueError(f"{where}: kind={raw['kind']!r}: must be one of {', '.join(KINDS)}")
    config = types.MappingProxyType(dict(raw["config"]))
    key = Key(*(raw[name] for name in Key._fields))
    return key, Entry(raw["rows"], raw["kind"], config, where)


def read(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """What a file lists, each with the line it begins on; nothing if there is no file.

    Raises:
        ValueError: it is not a JSON list of objects, naming the file and the line.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    decoder, at = json.JSONDecoder(), 0
    items: list[tuple[int, dict[str, Any]]] = []

    def skip(pattern: str) -> bool:
        nonlocal at
        match = re.compile(r"\s*" + pattern + r"\s*").match(text, at)
        at = match.end() if match else at
        return match is not None

    def line() -> int:
        return text.count("\n", 0, at) + 1

    if not skip(r"\["):
        raise ValueError(f"{path}, line {line()}: must be a list of entries")
    while not skip(r"\]"):
        if items and not skip(","):
            raise ValueError(f"{path}, line {line()}: must go on with a comma or end with a ]")
        begins = line()
        try:
            item, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
        if not isinstance(item, dict):
            raise ValueError(f"{path}, line {begins}: {item!r}: must be an object")
        items.append((begins, item))
    if at != len(text):
        raise ValueError(f"{path}, line {line()}: there must be nothing after the list")
    return items


def write(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Puts entries into a file, in the place of older ones for the same problem; the file is replaced whole."""
    merged = {_order(raw): dict(raw) for raw in (*(raw for _, raw in read(path)), *entries)}
    lines = [json.dumps(merged[order], allow_nan=False) for order in sorted(merged)]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    os.replace(part, path)


def _order(raw: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(raw[name] for name in ("dtype", "scheme", "N", "K", "L", "rows"))
