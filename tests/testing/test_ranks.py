"""`run_ranks`: what the ranks return, in order; what went wrong, the first of it; never a hang, nothing left behind."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epmoe.testing import RankFailed, RanksTimedOut, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def summed(rank, world_size, scale, *, offset=0.0):
    assert dist.get_rank() == rank and dist.get_world_size() == world_size
    x = torch.full((4,), rank * scale + offset)
    dist.all_reduce(x)
    return {"rank": rank, "sum": x, "threads": torch.get_num_threads()}


def many(rank, world_size):
    return {"rows": torch.arange(1 << 20, dtype=torch.float32) + rank, "text": "x" * 300_000}


def raises_first(rank, world_size, bad, pids):
    Path(pids, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == bad:
        raise ZeroDivisionError(f"planted in {rank}")
    x = torch.ones(4)
    dist.all_reduce(x)  # waits for the rank that will not come
    time.sleep(60)


def dies(rank, world_size, bad, how):
    dist.barrier()
    if rank == bad:
        how()
    dist.all_reduce(torch.ones(4))  # its peers learn of the death here, and raise


def stop_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    import ctypes

    ctypes.string_at(0)


def waits_in_a_collective(rank, world_size):
    if rank == 0:
        return "left early"
    dist.all_reduce(torch.ones(4))


def ignores_sigterm(rank, world_size, pids):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(pids, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 0:
        raise LookupError("rank 0 gives up")
    while True:
        time.sleep(1)


def returns_a_lambda(rank, world_size):
    return {"fine": torch.ones(2), "layers": [1, (lambda: rank)]}


def leaves_a_thread(rank, world_size):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return rank


def starts_a_process(rank, world_size, pids):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids, "child").write_text(str(child.pid))
    raise LookupError


def environment(rank, world_size, *names):
    import triton.knobs

    return [os.environ.get(name) for name in names], triton.knobs.runtime.interpret


def prints(rank, world_size):
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)


def same_randomness(rank, world_size):
    import random

    return random.random()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(holds, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order_with_args_kwargs_and_threads(world_size):
    results = run_ranks(summed, world_size, args=(2.0,), kwargs={"offset": 1.0}, threads=2)
    assert [r["rank"] for r in results] == list(range(world_size))
    expected = float(world_size * (world_size - 1) + world_size)
    assert all(r["sum"].tolist() == [expected] * 4 and r["threads"] == 2 for r in results)


def test_a_partial_runs():
    assert [r["sum"][0].item() for r in run_ranks(functools.partial(summed, scale=3.0), 2)] == [3.0, 3.0]


def test_results_beyond_a_pipe_buffer_arrive_whole():
    for rank, result in enumerate(run_ranks(many, 2)):
        assert torch.equal(result["rows"], torch.arange(1 << 20, dtype=torch.float32) + rank)
        assert len(result["text"]) == 300_000


def test_tensors_in_args_arrive_and_random_states_differ():
    results = run_ranks(functools.partial(summed, scale=torch.tensor(2.0)), 2, kwargs={"offset": torch.tensor(1.0)})
    assert results[0]["sum"].tolist() == [4.0] * 4
    assert len({*run_ranks(same_randomness, 2), *run_ranks(same_randomness, 2)}) == 4


@pytest.mark.parametrize("bad", [0, 2])
def test_the_first_failure_is_told_and_its_peers_end_at_once(bad, tmp_path):
    start = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        run_ranks(raises_first, 3, args=(bad, str(tmp_path)))
    assert time.monotonic() - start < 10  # the sleeps and the timeout are 60
    assert failure.value.rank == bad and failure.value.kind == "ZeroDivisionError"
    for part in (f"rank {bad} of 3", "ZeroDivisionError", f"planted in {bad}", "in raises_first", Path(__file__).name):
        assert part in str(failure.value)
    assert "rank_process" not in failure.value.traceback
    assert all(gone(int(file.read_text())) for file in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (stop_myself, "SIGKILL"),
        (functools.partial(os._exit, 3), "exit code 3"),
        (functools.partial(os._exit, 0), "exit code 0"),
        (segfault, "SIGSEGV"),
    ],
)
def test_a_rank_that_dies_without_a_word_is_named_and_not_the_peer_that_noticed(how, kind):
    with pytest.raises(RankFailed) as failure:
        run_ranks(dies, 2, args=(1, how))
    assert (failure.value.rank, failure.value.kind) == (1, kind)
    if kind == "SIGSEGV":
        assert "in segfault" in str(failure.value)


def test_a_hang_in_a_collective_ends_at_the_timeout_and_shows_where():
    start = time.monotonic()
    with pytest.raises(RanksTimedOut) as late:
        run_ranks(waits_in_a_collective, 3, timeout=2)
    assert time.monotonic() - start < 8
    assert late.value.ranks == [1, 2] and "still running: 1, 2" in str(late.value)
    for rank in (1, 2):
        assert "all_reduce" in late.value.stacks[rank] and "in waits_in_a_collective" in late.value.stacks[rank]


def test_a_rank_that_ignores_sigterm_is_ended_all_the_same(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 gives up"):
        run_ranks(ignores_sigterm, 2, args=(str(tmp_path),))
    assert time.monotonic() - start < 8
    assert gone(int((tmp_path / "1").read_text()))


def test_a_result_that_cannot_be_pickled_is_named():
    with pytest.raises(RankFailed, match=r"result\['layers'\]\[1\] is <function returns_a_lambda") as failure:
        run_ranks(returns_a_lambda, 2)
    assert failure.value.kind == "TypeError"


def test_a_thread_left_behind_keeps_nobody():
    assert run_ranks(leaves_a_thread, 2, timeout=20) == [0, 1]


def test_a_process_started_by_a_failing_rank_ends_with_it(tmp_path):
    with pytest.raises(RankFailed, match="LookupError"):
        run_ranks(starts_a_process, 1, args=(str(tmp_path),))
    assert eventually(lambda: gone(int((tmp_path / "child").read_text())))


def test_the_environment_of_now_and_env_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("RANKS_TEST", "set late")
    monkeypatch.setenv("TEST_OF_RANKS", "late too")
    names = ("RANKS_TEST", "TEST_OF_RANKS", "ONLY_RANKS", "GLOO_SOCKET_IFNAME")
    [(values, _)] = run_ranks(environment, 1, args=names, env={"ONLY_RANKS": "1"})
    assert values == ["set late", "late too", "1", "lo"]
    monkeypatch.delenv("RANKS_TEST")
    for interpret in ("0", "1"):  # read while triton is imported, so a warm process of the other kind won't do
        [(values, interpreted)] = run_ranks(environment, 1, args=names, env={"TRITON_INTERPRET": interpret})
        assert values[0] is None and interpreted == (interpret == "1")


def test_output_of_the_ranks_reaches_this_process(capfd):
    run_ranks(prints, 2)
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == ["", "out of 0", "out of 1"]
    assert sorted(err.split("\n")) == ["", "err of 0", "err of 1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": lambda rank, world_size: rank}, "fn=.*lambda.*top level of a file"),
        ({"args": (1, lambda: 2)}, r"args\[1\]=.*lambda"),
        ({"kwargs": {"offset": (x for x in ())}}, r"kwargs\['offset'\]="),
        ({"world_size": 0}, "world_size=0: must be an int > 0"),
        ({"threads": 1.5}, "threads=1.5: must be an int > 0"),
        ({"timeout": 0}, "timeout=0: must be seconds"),
        ({"timeout": "x"}, "timeout='x': must be seconds"),
        ({"args": 3}, "args=3: must be a sequence of what fn gets after rank and world_size"),
        ({"env": 3}, "env=3: must be a mapping of str to str"),
        ({"fn": 3}, "fn=3: must be a function"),
        ({"fn": os.getpid}, r"fn=getpid.*is called as fn\(rank, world_size, \*args, \*\*kwargs\), here with 0 args"),
        ({}, r"fn=summed\(rank, world_size, scale.*missing a required argument: 'scale'"),
        ({"args": (1, 2)}, "fn=summed.*here with 2 args and the kwargs.*too many positional arguments"),
        ({"backend": "mpi"}, "backend='mpi': must be one of 'gloo', 'nccl'"),
        ({"env": {"A": 1}}, r"env\['A'\]=1: must be a str"),
        ({"world_size": 99, "backend": "nccl"}, "world_size=99.*a GPU per rank"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(**{"fn": summed, "world_size": 2, **arguments})


def test_errors_survive_pickling():
    failed = pickle.loads(pickle.dumps(RankFailed(1, 2, "ValueError", "Traceback", [0])))
    assert (failed.rank, failed.kind, str(failed)) == (
        1,
        "ValueError",
        str(RankFailed(1, 2, "ValueError", "Traceback", [0])),
    )
    late = pickle.loads(pickle.dumps(RanksTimedOut(1.0, {1: "stack"})))
    assert late.ranks == [1] and "stack" in str(late)


SCRIPT = """
import os
import sys
import time
import torch.distributed as dist
from epmoe.testing import RankFailed, run_ranks

class Answer:
    def __init__(self, value):
        self.value = value

def fn(rank, world_size):
    names = [None] * world_size
    dist.all_gather_object(names, (rank, __name__))
    return Answer(names)

def stays(rank, world_size):
    open(str(rank), "w").write(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    print([answer.value for answer in run_ranks(fn, 2)], flush=True)
    if sys.argv[1] == "unguarded":
        os.environ["UNGUARDED"] = "1"
        try:
            run_ranks(fn, 2)
        except RankFailed as error:
            print(error)
    else:
        run_ranks(stays, 2)
elif "UNGUARDED" in os.environ:
    run_ranks(fn, 2)
"""
ANSWER = "[[(0, '__mp_main__'), (1, '__mp_main__')], [(0, '__mp_main__'), (1, '__mp_main__')]]\n"


def script(folder, *command):
    (folder / "a_script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_plain_script_runs_and_one_without_a_guard_is_told_so(tmp_path):
    process = script(tmp_path, "a_script.py", "unguarded")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""
    assert out.startswith(ANSWER + "rank ") and "call it under `if __name__ == '__main__':`" in out


def test_a_module_runs_and_no_rank_outlives_it_when_it_is_killed(tmp_path):
    process = script(tmp_path, "-m", "a_script", "stay")
    files = [tmp_path / "0", tmp_path / "1"]
    assert eventually(lambda: all(file.exists() and file.read_text() for file in files), seconds=60)
    process.kill()
    out, err = process.communicate(timeout=20)  # the pipes close: nobody is left who holds them
    assert (out, err) == (ANSWER, "")
    assert eventually(lambda: all(gone(int(file.read_text())) for file in files))


NESTED = """
import torch.distributed as dist
import pytest
from epmoe.testing import run_ranks

def fn(rank, world_size, value):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, rank * value)
    return everyone

@pytest.mark.parametrize("value", range(2))
def test_it(value):
    assert run_ranks(fn, 2, args=(value,)) == [[0, value]] * 2
"""


def test_a_worker_of_xdist_runs_ranks_without_the_file_being_importable(tmp_path):
    """One worker: that several get along is seen whenever this suite is run by several."""
    pytest.importorskip("xdist")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_nested.py").write_text(NESTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    bare = "import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main())"  # as the `pytest` command: no cwd
    command = [sys.executable, "-c", bare, "-q", "-n", "1", "--import-mode=importlib"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
def test_nccl_gives_each_rank_its_gpu():
    count = torch.cuda.device_count()
    results = run_ranks(on_its_gpu, count, backend="nccl")
    assert [r["device"] for r in results] == list(range(count))
    assert all(r["sum"].device.type == "cpu" and r["sum"].tolist() == [sum(range(count))] * 4 for r in results)


def on_its_gpu(rank, world_size):
    x = torch.full((4,), float(rank), device="cuda")
    dist.all_reduce(x)
    return {"device": torch.cuda.current_device(), "sum": x}
