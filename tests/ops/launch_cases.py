"""Run as a program, without Triton's interpreter: launches of one kernel, by Triton's own way and by the quick one, on
a driver that only writes down what it is told. Prints both accounts as JSON for `test_launch.py`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from epmoe.ops._launch import quick


class Driver:
    device = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 100 + self.device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def copy(x, scale, n, m, y, BLOCK: tl.constexpr, FLAG: tl.constexpr = False):
    pass


def words(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return ["tensor", argument.data_ptr(), str(argument.dtype)]
    return str(argument)


MEMORY = torch.zeros(64)
DESCRIBED = [TensorDescriptor(torch.zeros(32, 32), [32, 32], [32, 1], [8, columns]) for columns in (8, 16)]


def account(kernel: Any, searches: list[int]) -> dict[str, Any]:
    """Every launch as the launcher sees it, behind the number of the compilation it belongs to; and how often Triton
    looked for a kernel before the launches that only it can do."""
    seen: list[Any] = []
    compilations: list[Any] = []

    def compiled(key: str, signature: Any, device: int, *_: Any) -> Any:
        number = len(compilations)
        compilations.append(key)

        def run(x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
            seen.append([number, [x, y, z], stream, function, packed, [words(a) for a in arguments]])
            if metadata is not None:
                enter(metadata), leave(metadata)

        one = SimpleNamespace(
            run=run, function=f"f{number}", packed_metadata=f"p{number}", launch_metadata=lambda *_: "watched"
        )
        kernel.device_caches[device][0][key] = one
        return one

    kernel._do_compile = compiled
    a, b, odd, half = MEMORY[:16], MEMORY[16:32], MEMORY[1:17], MEMORY[32:].view(torch.bfloat16)
    launch = kernel[(4,)]
    for _ in range(2):
        for x in (a, b, odd, half, *DESCRIBED):
            for scale in (1.0, 0.5):
                launch(x, scale, 16, 16, None, BLOCK=64)
        for n in (1, 2, 16, 17, 2**31, 2**40):
            for m in (1, 2, 16, 2**40):
                launch(a, 1.0, n, m, b, BLOCK=64)
        for constants in (
            {"BLOCK": 32},
            {"BLOCK": 64, "FLAG": True},
            {"FLAG": True, "BLOCK": 64},
            {"BLOCK": tl.float16},
        ):
            launch(a, 1.0, 3, 3, None, **constants)
        launch(a, 1.0, 3, 3, None, BLOCK=64, num_warps=8)
        for grid in ((4, 5), (4, 5, 6), lambda given: (given["n"],)):
            kernel[grid](a, 1.0, 3, 3, None, BLOCK=64)
        Driver.device = 1
        launch(a, 1.0, 3, 3, None, BLOCK=64)
        Driver.device = 0
    launches, searched = len(seen), len(searches)
    launch(a, 1.0, 3, 3, None, 64)  # a constant by its place
    launch(a, 1.0, 3, m=3, y=None, BLOCK=64)  # run-time arguments by name
    launch(a, 1.0, 3, m=3, y=b, BLOCK=64)
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        chain.add(seen.append)
        launch(b, 1.0, 3, 3, None, BLOCK=64)
        chain.remove(seen.append)
    triton.knobs.runtime.debug = True
    launch(b, 1.0, 3, 3, None, BLOCK=64)
    triton.knobs.runtime.debug = False
    kernel.add_pre_run_hook(lambda *_, **__: seen.append("before"))
    launch(b, 1.0, 3, 3, None, BLOCK=64)
    return {"seen": seen, "launches": launches, "searches": searched, "compilations": len(compilations)}


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    searches: list[int] = []
    search = triton.runtime.jit.JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        searches.append(1)
        return search(self, *args, **kwargs)

    triton.runtime.jit.JITFunction.run = counted
    jit = triton.jit(do_not_specialize=["m"])
    plain = account(jit(copy), searches)
    searches.clear()
    print(json.dumps({"plain": plain, "quick": account(quick(jit(copy)), searches)}))
