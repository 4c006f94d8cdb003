"""`epmoe doctor`: looks at the machine, tries every way of moving and computing here, and says what to do."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable
from typing import IO

import torch

from epmoe.cli import machine
from epmoe.cli.finding import Finding, Report, Section
from epmoe.cli.trials import Trial, attempt, layer_is_right, run_apart, torch_compile_works, triton_compiles
from epmoe.comm.nodes import VARIABLE
from epmoe.dispatch import DISPATCHERS
from epmoe.experts import EXPERTS

DTYPES = {"cpu": ("float64", "float32", "float16", "bfloat16"), "cuda": ("float32", "float16", "bfloat16")}
_ROWS = {"cpu": "float32", "cuda": "bfloat16"}  # what the dispatchers move when tried
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
"""For trials that are no test of the network: a wrong setting of it must not fail them."""


def compiler_trials(device: str) -> list[Trial]:
    """Triton's compiler and, without a GPU, its interpreter; torch.compile."""
    compiled = {"TRITON_INTERPRET": "0"} if "TRITON_INTERPRET" in os.environ else {}
    trials = [
        Trial("Triton", triton_compiles, (device,), env=_LOOPBACK | compiled,
              advice="see why Triton compiles nothing: a C compiler, a writable cache (TRITON_CACHE_DIR), its version"),
        Trial("torch.compile", torch_compile_works, (device,), env=_LOOPBACK,
              advice="run without torch.compile, or see its error with TORCH_LOGS=+dynamo"),
    ]  # fmt: skip
    if device == "cpu":
        interpreted = {**_LOOPBACK, "TRITON_INTERPRET": "1", "EPMOE_CPU_KERNELS": "triton"}
        trials.append(
            Trial("Triton's interpreter", layer_is_right, ("local", "grouped", "float32", "cpu"), env=interpreted,
                  advice="kernels can't be tried without a GPU here: see the versions of triton and numpy")
        )  # fmt: skip
    return trials


def expert_trials(device: str) -> list[Trial]:
    """Each kind of experts in each dtype, alone in a process."""
    return [
        Trial(f"{experts}, {device} {dtype}", layer_is_right, ("local", experts, dtype, device), env=_LOOPBACK)
        for experts in EXPERTS
        for dtype in DTYPES[device]
    ]


def dispatcher_trials(device: str, experts: str, ranks: int) -> list[Trial]:
    """Each dispatcher, over `ranks` processes where it can use several."""
    backend = "nccl" if device == "cuda" else "gloo"
    dtype = _ROWS[device]
    trials = []
    for name in DISPATCHERS:
        alone = name == "local"
        where = "1 process" if alone else f"{ranks} rank{'s' * (ranks > 1)} ({backend})"
        title = f"{name}, {device} {dtype}, {where}"
        args = (name, experts, dtype, device)
        trials.append(
            Trial(title, layer_is_right, args, env=_LOOPBACK)
            if alone
            else Trial(title, layer_is_right, args, world_size=ranks, backend=backend, env=_halves(name, ranks))
        )
    return trials


def _halves(dispatcher: str, ranks: int) -> dict[str, str]:
    """Takes the halves of the ranks for nodes, where a dispatcher goes by nodes."""
    return {VARIABLE: str(-(-ranks // 2))} if dispatcher == "hierarchical" else {}


def examine(*, ranks: int = 2, timeout: float = 60.0, say: Callable[[str], None] = lambda _: None) -> Report:
    """The whole examination.

    Args:
        ranks: processes that the dispatchers are tried with; on CUDA no more than there are GPUs.
        timeout: seconds that one trial may take.
        say: told what is being tried, before it is.
    """
    with tempfile.TemporaryFile() as log:
        return _examine(ranks, timeout, say, log)


def _examine(ranks: int, timeout: float, say: Callable[[str], None], log: IO[bytes]) -> Report:
    def run(trials: list[Trial]) -> list[Finding]:
        findings = []
        for trial in trials:
            say(f"trying {trial.name}")
            findings.append(attempt(trial, timeout, log))
        return findings

    say("looking at the devices")
    here = _look_at_devices(timeout, log)
    usable = ["cpu", *(["cuda"] if here.gpus else [])]
    compilers = run(compiler_trials(usable[-1]))

    experts_found: list[Finding] = []
    dispatchers_found: list[Finding] = []
    paths: dict[str, tuple[str, ...]] = {"cpu": ()}
    if here.present:
        paths["cuda"] = ()
    for device in usable:
        trials = expert_trials(device)
        results = run(trials)
        experts_found += _with_way_round(trials, results, "experts", 1)
        working = [t.args[1] for t, r in zip(trials, results, strict=True) if r.ok and t.args[2] == _ROWS[device]]
        if not working:
            text = f"not tried: no experts work on {device} in {_ROWS[device]}"
            dispatchers_found += [Finding(f"{name}, {device}", None, text) for name in DISPATCHERS]
            continue
        # what experts="auto" takes, if it works: the other order of preference is EXPERTS' own
        experts = "reference" if device == "cpu" and "reference" in working else working[0]
        tried = min(ranks, here.gpus) if device == "cuda" else ranks
        trials = dispatcher_trials(device, experts, tried)
        results = run(trials)
        dispatchers_found += _with_way_round(trials, results, "dispatcher", 0)
        paths[device] = tuple(f"{t.args[0]} + {t.args[1]}" for t, r in zip(trials, results, strict=True) if r.ok)
        if tried < ranks:
            text = f"{ranks} asked for, {here.gpus} GPU{'s' * (here.gpus > 1)} here"
            dispatchers_found.append(Finding("ranks", None, text))

    sections = {
        "Versions": machine.versions(),
        "Host": machine.host(),
        "Environment": machine.environment(os.environ, here.present),
        "Devices": here.found,
        "Links": here.links,
        "Compilers": compilers,
        "Experts": experts_found,
        "Dispatchers": dispatchers_found,
    }
    return Report(tuple(Section(title, tuple(found)) for title, found in sections.items() if found), paths)


def _look_at_devices(timeout: float, log: IO[bytes]) -> machine.Devices:
    advice = "see whether nvidia-smi answers: if it does not either, the driver or a GPU needs a restart"
    result = run_apart(Trial("devices", machine.devices, env=_LOOPBACK, advice=advice), timeout, log)
    if isinstance(result, Finding):
        return machine.Devices([result], [], 0, torch.version.cuda is not None)
    return result


def _with_way_round(trials: list[Trial], results: list[Finding], field: str, position: int) -> list[Finding]:
    """The results, each failure with the values of `MoEConfig`'s `field` that do work on that device in that dtype.

    Dtypes with the same way round share one sentence, so that it is advised once.
    """

    def others(trial: Trial) -> list[str]:
        return [
            other.args[position]
            for other, result in zip(trials, results, strict=True)
            if result.ok and other.args[2:] == trial.args[2:] and other.world_size == trial.world_size
        ]

    failed = [t for t, result in zip(trials, results, strict=True) if result.ok is False and not result.advice]
    advice = {}
    for trial in failed:
        value, device, working = trial.args[position], trial.args[3], others(trial)
        alike = [
            t.args[2] for t in failed if t.args[position] == value and t.args[3] == device and others(t) == working
        ]
        way = f"MoEConfig({field}={' or '.join(map(repr, working))}) works" if working else "no other works either"
        where = f"on {device} in {', '.join(dict.fromkeys(alike))}"
        advice[trial.name] = f"{field}={value!r} fails {where}; {way} there"
    return [
        dataclasses.replace(result, advice=advice[trial.name]) if trial.name in advice else result
        for trial, result in zip(trials, results, strict=True)
    ]
