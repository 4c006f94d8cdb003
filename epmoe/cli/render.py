"""A report as a person reads it: one table per section, what works, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epmoe.cli.finding import Report

_MARKS = {True: ("ok", "green"), False: ("FAIL", "bold red"), None: ("", "")}


def render(report: Report, console: Console) -> None:
    """Prints it. Words and not signs or colours carry the meaning, so that any terminal and any log will do."""
    for section in report.sections:
        table = Table(title=section.title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(width=4)
        table.add_column(style="cyan", min_width=12)
        table.add_column(overflow="fold")
        for finding in section.findings:
            # Text: square brackets in a message are no markup
            table.add_row(Text(*_MARKS[finding.ok]), Text(finding.name), Text(finding.detail))
        console.print(table)
        console.print()
    for device, pairs in report.paths.items():
        works = Text(", ".join(pairs)) if pairs else Text("nothing works", "bold red")
        console.print(Text.assemble((f"on {device}: ", "bold"), works))
    console.print()
    if not report.what_to_do:
        console.print(Text("all good" if report.ok else "something is wrong, see above", "bold"))
        return
    console.print(Text("what to do", "bold"))
    for advice in report.what_to_do:
        console.print(Text(f"- {advice}"))


def render_capabilities(tables: Mapping[str, Sequence[Mapping[str, Any]]], console: Console) -> None:
    """Prints what `epmoe.capabilities.as_dict` says: a column per part, then the pairs and why others are refused."""
    for title in ("dispatchers", "experts"):
        rows = tables[title]
        table = Table(title=title, title_justify="left", title_style="bold", box=None)
        fields = list(rows[0])
        table.add_column("")
        for row in rows:
            table.add_column(Text(str(row[fields[0]])), style="cyan", overflow="fold")
        for field in fields[1:]:
            table.add_row(Text(field), *(Text(_plain(row[field])) for row in rows))
        console.print(table)
        console.print()
    joined = [pair for pair in tables["combinations"] if pair["refusal"] is None]
    refused = [pair for pair in tables["combinations"] if pair["refusal"] is not None]
    console.print(Text("works together", "bold"))
    for layout in dict.fromkeys(pair["layout"] for pair in joined):
        for dispatcher in dict.fromkeys(pair["dispatcher"] for pair in joined):
            names = [p["experts"] for p in joined if p["layout"] == layout and p["dispatcher"] == dispatcher]
            if names:
                console.print(Text(f"  {dispatcher}, {layout} rows: {', '.join(names)}"))
    console.print(Text("refused", "bold"))
    for reason in dict.fromkeys(pair["refusal"] for pair in refused):
        console.print(Text(f"- {reason}"))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
