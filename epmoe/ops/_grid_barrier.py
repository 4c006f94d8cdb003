"""A barrier among all programs of one launch, so that a kernel may read what its other programs wrote. Stands beside
the path of a token, in kernels that would otherwise be several launches.

It counts in the word that the driver keeps for each cooperative launch (the one behind CUDA's cooperative groups, at 4
bytes from the address in %envreg1 and %envreg2), so that there is no memory to allocate, to clear or to share: launches
on several streams, and replays of a CUDA graph, each have their own. Every arrival adds 1 and program 0 what is missing
to 2³¹: the top bit turns once per barrier, when the last has arrived, and nothing is ever reset.

    parity = grid_parity()      before anything else
    ...                         writes
    grid_arrive()
    ...                         whatever depends on no other program
    grid_wait(parity)
    ...                         reads of what the others wrote

A cooperative launch starts all its programs or fails: none waits for one that finds no place. Without one that word
does not exist, so no kernel may come here that was not launched with `cooperative_launch`. Interpreted programs run one
after another and would wait for ever: there each phase of a kernel is a launch of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from epmoe.ops._triton import jit, tl


@functools.cache
def cooperative_launch(device: torch.device) -> dict[str, Any] | None:
    """Launch arguments of a kernel with a grid barrier; None where its phases must be launches of their own."""
    if device.type == "cuda" and torch.version.hip is None:
        return {"launch_cooperative_grid": True}
    return None


@jit
def grid_parity():
    """What `grid_wait` takes: read at the start of a kernel, where it costs nothing, and before `grid_arrive`."""
    return tl.inline_asm_elementwise(
        """{
            .reg .b64 workspace;
            mov.b64 workspace, {%envreg2, %envreg1};
            ld.relaxed.gpu.global.u32 $0, [workspace + 4];
        }""",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def grid_arrive():
    """Says that this program has come here, with all its writes so far."""
    tl.debug_barrier()  # all threads' writes come before the one arrival
    others = tl.num_programs(0) - 1
    arrival = tl.where(tl.program_id(0) == 0, 0x7FFFFFFF - others + 1, 1)
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 thread;
            .reg .b64 workspace;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.b64 workspace, {%envreg2, %envreg1};
            mov.u32 $0, 0;
            @first red.release.gpu.global.add.u32 [workspace + 4], $1;
        }""",
        "=r,r",
        [arrival],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def grid_wait(parity):
    """Waits until all programs of the grid have arrived; what they wrote before is visible from here on."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred other;
            .reg .pred waiting;
            .reg .b32 word;
            .reg .b64 workspace;
            mov.u32 word, %tid.x;
            setp.ne.u32 other, word, 0;
            mov.b64 workspace, {%envreg2, %envreg1};
            mov.u32 $0, 0;
            @other bra done;
        poll:
            ld.acquire.gpu.global.u32 word, [workspace + 4];
            xor.b32 word, word, $1;
            setp.ge.s32 waiting, word, 0;
            @waiting bra poll;
        done:
        }""",
        "=r,r",
        [parity],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
