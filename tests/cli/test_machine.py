from __future__ import annotations

import socket

import pytest

from epmoe.cli import machine

GOOD = {
    "torch": "2.11.0+cu130",
    "triton": "3.7.1",
    "numpy": "2.4.6",
    "greenlet": "3.2",
    "safetensors": "0.5",
    "rich": "14",
    "typer": "0.12",
}
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-63\t0\t\tN/A
GPU1\tNV18\t X \tPXB\tNODE\t0-63\t0\t\tN/A
GPU2\tSYS\tPXB\t X \tPIX\t64-127\t1\t\tN/A
NIC0\tPIX\tNODE\tPIX\t X \t\t\t\t

Legend:

  X    = Self
"""


def wrong(found: dict[str, str]) -> dict[str, str]:
    return {f.name: f.advice for f in machine.versions(found) if f.ok is False}


def test_versions_that_fit_are_all_right() -> None:
    assert wrong(GOOD) == {}


@pytest.mark.parametrize(
    ("change", "name", "advice"),
    [
        ({"torch": "2.10.1"}, "torch", "torch>=2.11"),
        ({"triton": "3.5.1", "numpy": "2.0.0"}, "triton", "triton>=3.6"),
        ({"triton": "3.6.0"}, "triton with numpy", "numpy<2.4"),
        ({"transformers": "4.57.0"}, "transformers", "transformers>=5.17"),
    ],
)
def test_versions_known_to_fail_are_flagged_with_what_to_install(
    change: dict[str, str], name: str, advice: str
) -> None:
    found = wrong(GOOD | change)
    assert list(found) == [name] and advice in found[name]


def test_a_missing_requirement_is_wrong_and_a_missing_extra_is_not() -> None:
    assert list(wrong({k: v for k, v in GOOD.items() if k != "greenlet"})) == ["greenlet"]
    assert "transformers" not in GOOD


def test_a_version_is_compared_as_numbers() -> None:
    assert machine.parse_version("2.11.0+cu130") == (2, 11, 0) > machine.parse_version("2.9")
    assert machine.parse_version("3.6.0a0") == (3, 6, 0)


@pytest.mark.parametrize(
    ("env", "gpu", "bad"),
    [
        ({"TRITON_INTERPRET": "1"}, True, True),
        ({"TRITON_INTERPRET": "1"}, False, False),
        ({"EPMOE_CPU_KERNELS": "cuda"}, False, True),
        ({"EPMOE_CPU_KERNELS": "triton"}, False, True),
        ({"EPMOE_CPU_KERNELS": "triton", "TRITON_INTERPRET": "1"}, False, False),
        ({"EPMOE_RANKS_PER_NODE": "8"}, True, False),
        ({"EPMOE_RANKS_PER_NODE": "0"}, True, True),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, False, True),
        ({"NCCL_SOCKET_IFNAME": "^nosuch"}, True, False),
        ({"NCCL_SOCKET_IFNAME": "=l"}, True, True),
        ({"NCCL_SOCKET_IFNAME": "l"}, True, False),
    ],
)
def test_variables_that_can_not_be_meant_are_flagged_with_advice(
    env: dict[str, str], gpu: bool, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    flagged = [f for f in machine.environment(env, gpu) if f.ok is False]
    assert bool(flagged) == bad and all(f.advice for f in flagged)


def test_an_environment_without_variables_of_ours_says_so() -> None:
    assert "none" in machine.environment({"HOME": "/"}, gpu=True)[0].detail


def test_the_topology_names_nvlinks_and_pcie_paths_and_leaves_network_cards_out() -> None:
    links = machine.parse_topology(TOPOLOGY)
    assert links[0, 1] == links[1, 0] == "NVLink x18"
    assert (links[0, 2], links[1, 2], links[2, 0]) == ("SYS", "PXB", "SYS")
    assert set(links) == {(a, b) for a in range(3) for b in range(3) if a != b}


def test_a_machine_without_a_gpu_reports_its_cpu_and_no_links() -> None:
    here = machine.devices(0, 1)
    assert here.found[0].name == "CPU" and here.found[0].ok
    assert here.gpus > 0 or (here.links == [] and here.found[-1].name == "GPU")


def test_the_host_is_described() -> None:
    assert {"system", "cores", "C compiler"} <= {f.name for f in machine.host()}
