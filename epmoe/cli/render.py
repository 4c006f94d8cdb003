"""A report as a person reads it: one table per section, what works, what to do."""

from __future__ import annotations

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
