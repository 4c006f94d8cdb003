"""The doctor as the command runs it, with candidates that die, raise and hang among the real ones."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from epmoe.cli import doctor
from epmoe.cli.main import app
from epmoe.cli.trials import Trial
from epmoe.dispatch import DISPATCHERS
from epmoe.experts import EXPERTS


def dies(rank: int, world_size: int, *args: str) -> str:
    os._exit(1)


def raises(rank: int, world_size: int, *args: str) -> str:
    raise RuntimeError("no such instruction")


def hangs(rank: int, world_size: int, *args: str) -> str:
    time.sleep(600)
    return ""


def bad_experts(device: str) -> list[Trial]:
    args = ("local", "bad", "float32", device)
    return [
        Trial("bad exit", dies, args),
        Trial("bad raise", raises, args),
        Trial("bad hang", hangs, args, timeout=1.0),
    ]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *args], catch_exceptions=False)


def findings(report: dict[str, Any], title: str) -> dict[str, dict[str, Any]]:
    found = {section["title"]: section["findings"] for section in report["sections"]}[title]
    return {finding["name"]: finding for finding in found}


@pytest.fixture(scope="module")
def broken() -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        right = doctor.expert_trials
        patch.setattr(doctor, "expert_trials", lambda device: bad_experts(device) + right(device))
        return run("--json", "--ranks", "2")


def test_candidates_that_die_raise_and_hang_are_reported_with_their_reason(broken: Result) -> None:
    experts = findings(json.loads(broken.stdout), "Experts")
    for name, reason in (
        ("bad exit", "exit code 1"),
        ("bad raise", "RuntimeError: no such instruction"),
        ("bad hang", "no end after 1 s"),
    ):
        assert experts[name]["ok"] is False and reason in experts[name]["detail"], experts[name]
    advice = [text for text in json.loads(broken.stdout)["what_to_do"] if "'bad'" in text]
    assert len(advice) == 1 and "'reference') works there" in advice[0], "the way round is named, once"


def test_broken_candidates_do_not_hinder_the_others(broken: Result) -> None:
    report = json.loads(broken.stdout)
    experts = findings(report, "Experts")
    for name in EXPERTS:
        for dtype in ("float32", "float16", "bfloat16"):
            assert experts[f"{name}, cpu {dtype}"]["ok"], experts[f"{name}, cpu {dtype}"]
    assert experts["torch_grouped, cpu float64"]["ok"] is None, "a refusal is no failure"
    dispatchers = findings(report, "Dispatchers")
    assert all(finding["ok"] for finding in dispatchers.values()), dispatchers
    assert sum("2 ranks (gloo)" in name for name in dispatchers) == len(DISPATCHERS) - 1
    assert [pair.split(" + ")[0] for pair in report["paths"]["cpu"]] == list(DISPATCHERS)


def test_one_path_is_enough_for_exit_code_0_and_the_report_is_whole(broken: Result) -> None:
    report = json.loads(broken.stdout)
    assert broken.exit_code == 0 and report["ok"] is True
    titles = [section["title"] for section in report["sections"]]
    assert titles == ["Versions", "Host", "Environment", "Devices", "Compilers", "Experts", "Dispatchers"]
    assert report["what_to_do"]
    compilers = findings(report, "Compilers")
    assert set(compilers) == {"Triton", "Triton's interpreter", "torch.compile"}
    assert compilers["Triton's interpreter"]["ok"], compilers


def test_exit_code_is_1_when_nothing_computes_and_dispatchers_are_then_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "expert_trials", bad_experts)
    monkeypatch.setattr(doctor, "compiler_trials", lambda device: [])
    result = run("--ranks", "1")
    assert result.exit_code == 1
    for text in ("nothing works", "FAIL", "what to do", "not tried: no experts work on cpu", "no other works either"):
        assert text in " ".join(result.stdout.split()), result.stdout


def test_exit_code_is_1_when_the_devices_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs is no machine without GPUs."""
    monkeypatch.setattr(doctor.machine, "devices", hangs)
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "expert_trials", lambda device: [])
    monkeypatch.setattr(doctor, "compiler_trials", lambda device: [])
    result = run("--json", "--timeout", "1")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["paths"]["cuda"] == []
    assert "no end after 1 s" in findings(report, "Devices")["devices"]["detail"]


@pytest.mark.gpu
def test_every_dispatcher_and_all_experts_work_on_a_gpu() -> None:
    result = run("--json", "--ranks", "2")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["ok"]
    assert [pair.split(" + ")[0] for pair in report["paths"]["cuda"]] == list(DISPATCHERS), report
    assert not [f for s in report["sections"][4:] for f in s["findings"] if f["ok"] is False], report
