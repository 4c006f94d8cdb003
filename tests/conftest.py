"""What holds for every test: the Triton interpreter without CUDA, one seed per run, GPU markers, no process group left.

Environment: `EPMOE_TEST_SEED` repeats a run's inputs; `EPMOE_TEST_GPU=0` skips the tests marked `gpu` and `gpu2` even
where GPUs are; `PYTEST_TIMEOUT` seconds for one test (with pytest-timeout installed).
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Generator, Iterator

# Workers inherit these: libraries read the thread counts once, when they are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTEST_TIMEOUT", "180")
# xdist's workers are started with this environment, so they all draw from the seed that the first process chose.
RUN_SEED = int(os.environ.setdefault("EPMOE_TEST_SEED", str(random.SystemRandom().randrange(2**31))))

import torch  # noqa: E402

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    # Triton's own library functions become interpreted or compiled when triton is imported.
    assert "triton" not in sys.modules, (
        "triton was imported too early to choose its interpreter: set TRITON_INTERPRET=1"
    )
    os.environ["TRITON_INTERPRET"] = "1"

import pytest  # noqa: E402

from epmoe.ops._triton import INTERPRET  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    from epmoe.testing import quicken_interpreter

    quicken_interpreter()

torch.set_num_threads(1)

_GPUS_NEEDED = {"gpu": 1, "gpu2": 2}


def pytest_report_header() -> str:
    kernels = "interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled"
    return (
        f"epmoe: EPMOE_TEST_SEED={RUN_SEED}, torch {torch.__version__}, {_gpu_count()} GPUs, Triton kernels {kernels}"
    )


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    need = max((n for mark, n in _GPUS_NEEDED.items() if item.get_closest_marker(mark)), default=0)
    have = _gpu_count()
    # Skipped from here, not by a marker, so that the summary is one line per reason.
    if need > have:
        pytest.skip(f"needs {need} CUDA GPU{'s' * (need > 1)}, torch sees {have}")
    if need and os.environ.get("EPMOE_TEST_GPU") == "0":
        pytest.skip("a GPU test, and EPMOE_TEST_GPU=0: make test-gpu runs it")


def _seed_of(nodeid: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{RUN_SEED}/{nodeid}".encode()).digest()[:4], "big") >> 1


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """An int in [0, 2**31) from the run's seed and the test's id: fresh in every run, the same in a repeated one."""
    return _seed_of(request.node.nodeid)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where kernels run: compiled on a GPU, through the interpreter on CPU. One process can do only one of them."""
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    return str(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        report.sections.append(("seed", f"{_seed_of(item.nodeid)}; EPMOE_TEST_SEED={RUN_SEED} repeats it"))
    return report


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """A group that outlives its test is found by the next one, which then hangs or talks to the wrong ranks.

    A group that stood before (a module's fixture owns it) may stay.
    """
    dist = torch.distributed
    stood_before = dist.is_available() and dist.is_initialized()
    yield
    if dist.is_available() and dist.is_initialized() and not stood_before:
        dist.destroy_process_group()
        pytest.fail(
            "the test left the default process group initialised: call torch.distributed.destroy_process_group()"
        )
