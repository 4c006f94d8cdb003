"""What the doctor reads without trying anything: versions, host, environment, devices and the links between them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

import epmoe
from epmoe.cli.finding import Finding

GIB = 2**30
_SMALL_SHM = GIB // 4
_REQUIRED = ("torch", "triton", "numpy", "greenlet", "safetensors", "rich", "typer")
_OPTIONAL = {"transformers": "epmoe[transformers]", "matplotlib": "epmoe[plots]"}
_OLDEST = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 17)}

# Variables that change what runs or how ranks find each other; shown when set.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMP_NUM_THREADS", "TRITON_INTERPRET",
    "TRITON_CACHE_DIR", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "EPMOE_CPU_KERNELS", "EPMOE_VALIDATE",
    "EPMOE_RANKS_PER_NODE",
)  # fmt: skip


def parse_version(text: str) -> tuple[int, ...]:
    """`2.11.0+cu130` -> (2, 11, 0): the numbers up to the first part that is none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def installed() -> dict[str, str]:
    """Version of each package of ours that is here."""
    found = {}
    for package in (*_REQUIRED, *_OPTIONAL):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions(found: Mapping[str, str] | None = None) -> list[Finding]:
    """Packages, with those that are missing, too old, or known not to work together; `found` as from `installed()`."""
    found = installed() if found is None else found
    findings = [
        Finding("epmoe", None, f"{epmoe.__version__} in {Path(epmoe.__file__).parent}"),
        Finding("Python", None, f"{platform.python_version()} in {sys.executable}"),
    ]
    for package in (*_REQUIRED, *_OPTIONAL):
        have, oldest = found.get(package), _OLDEST.get(package)
        wanted = f"{package}>={'.'.join(map(str, oldest))}" if oldest else package
        if have is None and package in _OPTIONAL:
            findings.append(Finding(package, None, f"not installed (optional: pip install '{_OPTIONAL[package]}')"))
        elif have is None and package == "triton" and platform.system() != "Linux":
            findings.append(Finding(package, None, f"not installed: there is none for {platform.system()}"))
        elif have is None:
            findings.append(Finding(package, False, "not installed", f"pip install '{wanted}'"))
        elif oldest and parse_version(have) < oldest:
            findings.append(Finding(package, False, f"{have} is too old", f"pip install '{wanted}'"))
        else:
            findings.append(Finding(package, True, have))
    triton, numpy = (parse_version(found.get(package, "")) for package in ("triton", "numpy"))
    if triton and triton < (3, 7) and numpy >= (2, 4):
        findings.append(
            Finding(
                "triton with numpy",
                False,
                f"triton {found['triton']} with numpy {found['numpy']}: kernels fail in Triton's interpreter",
                "to run kernels without a GPU (the tests do): pip install 'numpy<2.4', or triton>=3.7",
            )
        )
    return findings


def host() -> list[Finding]:
    """Cores, memory and /dev/shm."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    findings = [
        Finding("system", None, platform.platform()),
        Finding("cores", None, f"{usable} usable of {os.cpu_count()}"),
    ]
    if (meminfo := Path("/proc/meminfo")).exists():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines() if ":" in line}
        text = f"{kib['MemTotal'] * 1024 / GIB:.1f} GiB, {kib['MemAvailable'] * 1024 / GIB:.1f} available"
        limit = Path("/sys/fs/cgroup/memory.max")
        if limit.exists() and (bound := limit.read_text().strip()).isdigit():
            text += f"; this container may use {int(bound) / GIB:.1f} GiB"
        findings.append(Finding("memory", None, text))
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
        small = shm.free < _SMALL_SHM
        advice = "give /dev/shm room: start the container with --shm-size=1g or more, as NCCL and data loaders need it"
        text = f"{shm.total / GIB:.2f} GiB, {shm.free / GIB:.2f} free"
        findings.append(Finding("/dev/shm", not small, text, advice if small else ""))
    compiler = next((path for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name
                     and (path := shutil.which(name))), None)  # fmt: skip
    findings.append(
        Finding("C compiler", True, compiler)
        if compiler
        else Finding("C compiler", False, "none of $CC, gcc, clang, cc is on PATH",
                     "install gcc (or set CC): Triton and torch.compile build their launchers with it")
    )  # fmt: skip
    return findings


def environment(env: Mapping[str, str], gpu: bool) -> list[Finding]:
    """The variables that matter and are set, and those among them that can't be meant."""
    findings = []
    for name in _VARIABLES:
        if name not in env:
            continue
        wrong, advice = _judge(name, env[name], env, gpu)
        findings.append(Finding(name, False if wrong else None, env[name] + (f" ({wrong})" if wrong else ""), advice))
    return findings or [Finding("variables", None, "none that matter here is set")]


def _judge(name: str, value: str, env: Mapping[str, str], gpu: bool) -> tuple[str, str]:
    """(what is wrong, what to do); the first is empty for what is only slow."""
    on = value.lower() in ("1", "true", "yes", "on", "y")
    if name == "TRITON_INTERPRET" and on and gpu:
        return "kernels run in Python, not on the GPU", "unset TRITON_INTERPRET: it is for machines without a GPU"
    if name == "EPMOE_CPU_KERNELS" and value not in ("torch", "triton"):
        return "must be torch or triton", "unset EPMOE_CPU_KERNELS, or set it to torch or triton"
    if name == "EPMOE_CPU_KERNELS" and value == "triton" and env.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1", "set TRITON_INTERPRET=1 beside EPMOE_CPU_KERNELS=triton, or unset both"
    if name == "EPMOE_RANKS_PER_NODE" and not (value.isdecimal() and int(value) > 0):
        return "must be an int > 0", "set EPMOE_RANKS_PER_NODE to the ranks that share a node, or unset it"
    if name == "EPMOE_VALIDATE" and value not in ("", "0"):
        return "", "EPMOE_VALIDATE makes every layer wait for the device: unset it once the ids are known to be right"
    if name == "CUDA_LAUNCH_BLOCKING" and on and gpu:
        return "", "CUDA_LAUNCH_BLOCKING=1 waits for every kernel, so nothing overlaps: unset it unless debugging"
    if name == "NCCL_P2P_DISABLE" and on and gpu:
        return "", "NCCL_P2P_DISABLE=1 sends rows through host memory: unset it where GPUs have peer access"
    if name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        here = [interface for _, interface in socket.if_nameindex()]
        if missing := _missing_interfaces(value, here, prefixes=name == "NCCL_SOCKET_IFNAME"):
            return f"no such interface: {missing}", f"set {name} to one of {', '.join(here)}, or unset it"
    return "", ""


def _missing_interfaces(value: str, here: list[str], prefixes: bool) -> str:
    """Names in `value` that no interface has. NCCL takes prefixes, `=` before exact names, `^` before excluded ones."""
    if prefixes and value.startswith("^"):
        return ""
    exact = not prefixes or value.startswith("=")
    names = [part.strip().split(":")[0] for part in value.lstrip("=").split(",")]
    return ", ".join(n for n in names if not any(i == n or (not exact and i.startswith(n)) for i in here))


@dataclasses.dataclass(frozen=True)
class Devices:
    """What computes here. `gpus` is how many torch can use; `present`: there are some that it should be able to use."""

    found: list[Finding]
    links: list[Finding]
    gpus: int
    present: bool


def devices(rank: int, world_size: int) -> Devices:
    """A rank's function, because asking a sick driver may never end."""
    smi = _nvidia_smi("--query-gpu=index,uuid,driver_version", "--format=csv,noheader")
    rows = [tuple(part.strip() for part in line.split(",")) for line in smi.splitlines() if line.count(",") == 2]
    physical = {row[1].removeprefix("GPU-"): int(row[0]) for row in rows if row[0].isdigit()}
    found = [Finding("CPU", True, platform.processor() or platform.machine())]
    if torch.version.cuda is None:
        gpu = Finding("GPU", None, "none seen; torch is built without CUDA")
        if rows:
            text = f"{len(rows)} in this machine, but torch {torch.__version__} is built without CUDA"
            gpu = Finding("GPU", False, text, "install a CUDA build of torch: https://pytorch.org/get-started/locally")
        return Devices([*found, gpu], [], 0, False)

    driver = rows[0][2] if rows else "not found by nvidia-smi"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent"
    found.append(Finding("CUDA", None, f"torch is built for {torch.version.cuda}, driver {driver}, NCCL {nccl}"))
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Devices([*found, Finding("GPU", None, "hidden by CUDA_VISIBLE_DEVICES")], [], 0, False)
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except RuntimeError as error:  # no driver, one too old, a GPU that fell off the bus
        reason = str(error).splitlines()[0]
        if not rows:
            return Devices([*found, Finding("GPU", None, f"none seen ({reason})")], [], 0, False)
        advice = "make torch and the driver fit: a newer driver, or a torch built for an older CUDA"
        return Devices([*found, Finding("GPU", False, reason, advice)], [], 0, True)
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        text = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs, "
            f"{total / GIB:.1f} GiB, {free / GIB:.1f} free"
        )
        advice = ""
        if capability < (8, 0):
            advice = f"GPU {index} is older than compute capability 8.0: only experts='reference' can run there"
        elif free < GIB:
            advice = f"GPU {index} is full: see nvidia-smi for the processes that hold its memory"
        found.append(Finding(f"GPU {index}", not advice, text, advice))
    names = [str(getattr(torch.cuda.get_device_properties(i), "uuid", "")) for i in range(count)]
    return Devices(found, _links(count, [physical.get(name) for name in names]), count, True)


def _links(count: int, physical: list[int | None]) -> list[Finding]:
    """One line per GPU: whom it reaches, and over what; `physical[i]` is nvidia-smi's number of GPU i."""
    topology = parse_topology(_nvidia_smi("topo", "-m")) if count > 1 else {}
    findings = []
    for a in range(count if count > 1 else 0):
        over: dict[str, list[str]] = {}
        unreached = []
        for b in range(count):
            if a == b:
                continue
            here, there = physical[a], physical[b]
            link = topology.get((here, there), "unknown") if here is not None and there is not None else "unknown"
            over.setdefault(link, []).append(str(b))
            if not torch.cuda.can_device_access_peer(a, b):
                unreached.append(str(b))
        text = "; ".join(f"{link} to {', '.join(others)}" for link, others in over.items())
        text += f"; no peer access to {', '.join(unreached)}" if unreached else "; peer access to all"
        advice = "GPUs without peer access exchange rows through host memory: look at IOMMU, ACS and MIG settings"
        findings.append(Finding(f"GPU {a}", None if unreached else True, text, advice if unreached else ""))
    return findings


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """`nvidia-smi topo -m` -> how GPU a reaches GPU b: `NVLink x18`, or the PCIe path (PIX, PXB, PHB, NODE, SYS)."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((line for line in lines if line and line[0] == "GPU0" and "X" not in line), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    links = {}
    for line in lines:
        if line and line is not header and re.fullmatch(r"GPU\d+", line[0]):
            for column, word in zip(columns, line[1:], strict=False):
                if word != "X":
                    links[int(line[0][3:]), column] = re.sub(r"^NV(\d+)$", r"NVLink x\1", word)
    return links


def _nvidia_smi(*args: str) -> str:
    """What it prints; nothing where it is absent or fails."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return ""
    done = subprocess.run([path, *args], capture_output=True, text=True, timeout=30)
    return done.stdout if done.returncode == 0 else ""
