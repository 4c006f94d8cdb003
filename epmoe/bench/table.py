"""Tables of records: for README, between its two markers, for a page beside the records, and for the terminal.

One table per bench and kind of device, whatever numbers of ranks. Keys of the cases that have one value throughout
stand in the caption, the others are columns; then come time, floor, rates and each peer with how many times as long it
took. Where cases differ in ranks alone, *growth* is the time over that of the fewest ranks, each with as many tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rich.table import Table as RichTable

from epmoe.bench.records import Record, identity, load

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
IN_README = ("model", "layer", "routed_mlp", "dispatch_combine")
OTHERS = "tables.md"  # beside the records: the benches that README has no room for
_BENCHES = (*IN_README, "grouped_gemm", "quantized", "overlap")  # others behind
_KNOWN = {
    *("bench", "case", "median_us", "floor_us", "tflops", "gb_s", "wire_bytes", "peers"),
    *("commit", "date", "torch", "triton", "device"),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, a caption, and cells as text; columns from `first_number` on are numbers."""

    bench: str
    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    first_number: int

    def markdown(self) -> str:
        """As README shows it."""
        rule = ["---:" if column >= self.first_number else "---" for column in range(len(self.header))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", self.caption, "", *lines])

    def rich(self) -> RichTable:
        """As the terminal shows it."""
        table = RichTable(title=self.title, caption=self.caption, title_justify="left", caption_justify="left")
        for column, name in enumerate(self.header):
            table.add_column(name, justify="right" if column >= self.first_number else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


def tables(records: Sequence[Record], devices: str) -> list[Table]:
    """One table per bench. `devices` names what they were measured on, as `2 × NVIDIA H200`."""
    benches = {record["bench"] for record in records}
    return [
        _table(bench, [record for record in records if record["bench"] == bench], devices)
        for bench in _in_order(benches)
    ]


def _in_order(benches: Collection[str]) -> list[str]:
    known = [bench for bench in _BENCHES if bench in benches]
    return [*known, *sorted(set(benches) - set(known))]


def _table(bench: str, records: Sequence[Record], devices: str) -> Table:
    keys = list(dict.fromkeys(key for record in records for key in record["case"]))
    values = {key: [record["case"].get(key) for record in records] for key in keys}
    fixed = {key for key in keys if len(records) > 1 and len(set(values[key])) == 1}
    shown = [key for key in keys if key not in fixed]
    numbers = [("epmoe µs", "median_us", 1), ("floor µs", "floor_us", 1), ("TFLOP/s", "tflops", 0), ("GB/s", "gb_s", 0)]
    extra = sorted({name for r in records for name, v in r.items() if name not in _KNOWN and _is_number(v)})
    numbers += [
        (
            name.removesuffix("_us") + " µs" if name.endswith("_us") else name.replace("_per_", "/"),
            name,
            2 if name.endswith("_mb") else 1,
        )
        for name in extra
    ]
    numbers = [column for column in numbers if any(column[1] in record for record in records)]
    peers = list(dict.fromkeys(name for record in records for name in record["peers"]))
    fewest = _fewest_ranks(records) if len(set(values.get("ranks", ()))) > 1 else {}

    rows = []
    for record in sorted(records, key=lambda r: [_order(r["case"].get(key)) for key in shown]):
        cells = [_text(record["case"].get(key)) for key in shown]
        cells += [_number(record.get(name), digits) for _, name, digits in numbers]
        if fewest:
            cells.append(f"{record['median_us'] / fewest[_but_ranks(record)]['median_us']:.2f}×")
        for peer in peers:
            time = record["peers"].get(peer)
            cells.append("" if time is None else f"{_number(time, 1)} ({time / record['median_us']:.2f}×)")
        rows.append(tuple(cells))
    constants = [f"{key} {_text(values[key][0])}" for key in keys if key in fixed]
    sources = [", ".join(sorted({str(record[name]) for record in records})) for name in ("torch", "triton", "commit")]
    caption = "; ".join([*constants, "torch {}, triton {}, commit {}".format(*sources)])
    titles = [title for title, _, _ in numbers] + (["growth"] if fewest else [])
    header = (*shown, *titles, *(f"{peer} µs" for peer in peers))
    return Table(bench, f"`{bench}` on {devices}", caption, header, tuple(rows), len(shown))


def _but_ranks(record: Record) -> str:
    return identity({**record, "case": {key: value for key, value in record["case"].items() if key != "ranks"}})


def _fewest_ranks(records: Sequence[Record]) -> dict[str, Record]:
    """Of the records of each case but for its ranks, the one with the fewest."""
    fewest: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: r["case"].get("ranks", 0)):
        fewest.setdefault(_but_ranks(record), record)
    return fewest


def devices_named(counts: Iterable[int], device: str) -> str:
    """`2 × NVIDIA H200`, or `2, 4, 8 × NVIDIA H200`."""
    return f"{', '.join(map(str, sorted(set(counts))))} × {device}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _order(value: object) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, (int, float)) else (1, 0.0, _text(value))


def _number(value: float | None, digits: int) -> str:
    """Thousands apart, and no decimals that nobody reads."""
    if value is None:
        return ""
    return f"{value:,.{digits if value < 100 else 0}f}"


def all_tables(results: Path) -> list[Table]:
    """The tables of every `<device>-x<count>.json` in the folder `results`: by device, each bench's of all counts."""
    made = []
    by_device: dict[str, list[tuple[int, list[Record]]]] = {}
    for path in results.glob("*-x*.json"):
        kind, _, count = path.stem.rpartition("-x")
        if records := load(path):
            by_device.setdefault(kind, []).append((int(count), records))
    for _, files in sorted(by_device.items()):
        files.sort(key=lambda file: file[0])
        everything = [(count, record) for count, records in files for record in records]
        for bench in _in_order({record["bench"] for _, record in everything}):
            of_bench = [(count, record) for count, record in everything if record["bench"] == bench]
            devices = devices_named([count for count, _ in of_bench], of_bench[0][1]["device"])
            made += tables([record for _, record in of_bench], devices)
    return made


def rendered(readme: str, made: Sequence[Table]) -> str:
    """`readme` with the text between its markers replaced by those of `made` that go there.

    Raises:
        ValueError: the markers are missing, doubled, or the wrong way round.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README must hold one line {BEGIN} and, after it, one line {END}")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{_body(table for table in made if table.bench in IN_README)}\n\n{END}{after}"


def page(made: Sequence[Table]) -> str:
    """The file `OTHERS`."""
    others = _body(table for table in made if table.bench not in IN_README)
    return f"# More of what was measured\n\nWritten by `epmoe bench table`.\n\n{others}\n"


def _body(made: Iterable[Table]) -> str:
    return "\n\n".join(table.markdown() for table in made) or "No records yet."
