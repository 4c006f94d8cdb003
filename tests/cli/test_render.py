from __future__ import annotations

import io

from rich.console import Console

from epmoe.cli.finding import Finding, Report, Section
from epmoe.cli.render import render


def shown(report: Report) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=200))
    return out.getvalue()


def report(*findings: Finding, **paths: tuple[str, ...]) -> Report:
    return Report((Section("Subject", findings),), paths or {"cpu": ("local + reference",)})


def test_every_part_of_a_finding_is_shown_and_brackets_are_no_markup() -> None:
    text = shown(report(Finding("thing", False, "got [M, K] and [bold]", "change it")))
    for part in ("Subject", "FAIL", "thing", "got [M, K] and [bold]", "what to do", "- change it", "local + reference"):
        assert part in text


def test_all_good_is_said_only_when_nothing_is_to_be_done_and_every_device_has_a_path() -> None:
    assert "all good" in shown(report(Finding("thing", True, "fine")))
    assert "all good" not in shown(report(Finding("thing", None, "slow", "make it fast")))
    broken = shown(report(Finding("thing", True, "fine"), cpu=("a + b",), cuda=()))
    assert "all good" not in broken and "nothing works" in broken


def test_advice_is_given_once_and_what_is_broken_comes_first() -> None:
    both = report(Finding("a", None, "", "later"), Finding("b", False, "", "now"), Finding("c", False, "", "now"))
    assert both.what_to_do == ("now", "later")
