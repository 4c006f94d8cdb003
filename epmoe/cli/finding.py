"""What the doctor finds, as plain data: findings in sections, sections in a report. No drawing, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        ok: True: it works or is right; False: it does not; None: a fact, or something that was not tried.
        detail: the fact, or why it does not work.
        advice: what to do about it; empty when there is nothing to do.
    """

    name: str
    ok: bool | None
    detail: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """Findings about one subject."""

    title: str
    findings: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """All sections, and for each device type present the "dispatcher + experts" pairs that gave right results."""

    sections: tuple[Section, ...]
    paths: Mapping[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        """Whether at least one path works on each device type present."""
        return all(self.paths.values())

    @property
    def what_to_do(self) -> tuple[str, ...]:
        """Every piece of advice once, what is broken first."""
        findings = [f for section in self.sections for f in section.findings if f.advice]
        findings.sort(key=lambda finding: finding.ok is not False)
        return tuple(dict.fromkeys(finding.advice for finding in findings))

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "ok": self.ok,
            "paths": {device: list(pairs) for device, pairs in self.paths.items()},
            "sections": [dataclasses.asdict(section) for section in self.sections],
            "what_to_do": list(self.what_to_do),
        }
