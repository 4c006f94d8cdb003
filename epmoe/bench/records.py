"""Records of what was measured: one JSON file per kind and number of devices, one record per bench and case.

A record is what a figure needs to be believed: the case, the time, the floor and the peers of the same run, and which
code, versions and device gave them. `table.py` turns records into README's tables.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from epmoe.tuning.store import slug

RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]
_FIRST = ("bench", "case", "median_us", "floor_us", "tflops", "gb_s", "wire_bytes", "peers")
_LAST = ("commit", "date", "torch", "triton", "device")
_REQUIRED = ("bench", "case", "median_us", "floor_us", "peers", *_LAST)
_DIGITS = {"tflops": 1, "gb_s": 1, "sent_mb": 4, "received_mb": 4}


def make_record(
    bench: str,
    case: Mapping[str, str | int | bool],
    *,
    median_us: float,
    floor_us: float,
    peers: Mapping[str, float],
    device: torch.device,
    tflops: float | None = None,
    gb_s: float | None = None,
    wire_bytes: int | None = None,
    **more: Any,
) -> Record:
    """A record of this run, in the order of its fields; what is None is left out.

    Args:
        bench, case: what was measured; together they are the record's identity.
        median_us, floor_us, peers: microseconds; `peers` by name, measured in the same run.
        tflops, gb_s: per rank; gb_s says of what in the bench's own documentation.
        wire_bytes: that one rank sends, or receives if that is more.
        more: further figures of this bench.
    """
    given = {"tflops": tflops, "gb_s": gb_s, "wire_bytes": wire_bytes, **more}
    record = {
        "bench": bench,
        "case": dict(case),
        "median_us": median_us,
        "floor_us": floor_us,
        **{name: value for name, value in given.items() if value is not None},
        "peers": {name: round(value, 2) for name, value in peers.items()},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "device": device_name(device),
    }
    return {
        name: round(value, _DIGITS.get(name, 2)) if isinstance(value, float) else value
        for name, value in _ordered(record).items()
    }


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def results_file(folder: Path, device: str, count: int) -> Path:
    """`<folder>/<device>-x<count>.json`, the device's name in lower case and dashes."""
    return folder / f"{slug(device)}-x{count}.json"


def save(records: Iterable[Record], folder: Path, count: int) -> list[Path]:
    """Puts records into `folder`'s files, a newer one of the same bench and case in the place of the older.

    Files are replaced whole, so that a reader, or a run that is cut off, never sees half of one. Keys of a case that an
    older record lacks make it another case.

    Args:
        count: devices that each record's run used.

    Returns:
        The files written.

    Raises:
        ValueError: a record lacks a field, or JSON can't hold it; nothing is written then.
    """
    by_file: dict[Path, list[Record]] = {}
    for record in records:
        missing = [name for name in _REQUIRED if name not in record]
        if missing:
            raise ValueError(f"record of bench {record.get('bench')!r}: lacks {', '.join(missing)}")
        by_file.setdefault(results_file(folder, record["device"], count), []).append(record)
    for path, new in by_file.items():
        merged = {identity(record): record for record in (*(load(path) if path.exists() else ()), *new)}
        _replace(path, dump(merged.values()))
    return list(by_file)


def load(path: Path) -> list[Record]:
    """The records of one file.

    Raises:
        ValueError: the file is not a list of records.
    """
    try:
        records = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(records, list) or not all(isinstance(r, dict) and "bench" in r and "case" in r for r in records):
        raise ValueError(f"{path}: must be a list of records, each with a bench and a case")
    return records


def identity(record: Record) -> str:
    """What makes two records the same measurement: bench and case, whatever the order of the case's keys."""
    return json.dumps([record["bench"], record["case"]], sort_keys=True)


def dump(records: Iterable[Record]) -> str:
    """JSON with one record per line, sorted by bench and case, numbers by value, so that diffs can be read."""
    lines = [json.dumps(_ordered(record), allow_nan=False) for record in sorted(records, key=_sort_key)]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def _sort_key(record: Record) -> tuple[Any, ...]:
    case = sorted(record["case"].items())
    return record["bench"], [(key, (1, 0, value) if isinstance(value, str) else (0, value, "")) for key, value in case]


def _ordered(record: Record) -> Record:
    others = sorted(name for name in record if name not in _FIRST and name not in _LAST)
    return {name: record[name] for name in (*_FIRST, *others, *_LAST) if name in record}


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(part, 0o644)  # mkstemp's files are for their owner only
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def commit(root: Path | None = None) -> str:
    """The commit that is measured: EPMOE_COMMIT if set, else what git says of the working tree, else `unknown`.

    `-dirty` marks a tree with changes; records and README, which a bench itself changes, do not count.
    """
    if given := os.environ.get("EPMOE_COMMIT"):
        return given
    root = root or Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed, perhaps inside somebody else's repository
        return "unknown"
    head = _git(root, "rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    outside = [":(exclude)epmoe/bench/results", ":(exclude)README.md"]
    return head + ("-dirty" if _git(root, "status", "--porcelain", "--", ".", *outside) else "")


def _git(root: Path, *arguments: str) -> str:
    """What git prints; nothing when there is no git or it has no answer (a repository without commits)."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
