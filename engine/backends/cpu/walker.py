"""The executor's native part, compiled by Numba into C-callable functions: a team of threads walks a plan.

Note [plan]: a launch is 16 words of 8 bytes: entry, parameter block, groups, most pieces, time of its end, chain, barrier, phase; word
8, in a cache line of its own, has a bit for each piece that was taken. A chain of c small launches is run by one thread, one after
the other; its head has chain = c. Launches that do not depend on each other form a phase: only the last one has barrier = 1, and phase =
the number of launches before it that belong to it. A traced run has a barrier after every launch.

Note [job]: one word a cache line: run number, plan, launches, stop, arrivals at the barrier, its turn, abort, stopped (the number of the
run that was aborted), trace; then one `parked` word for each thread.

Groups depend on shapes alone and no group reads what another writes, so results have the same bits however they are shared out.
"""

# mypy: ignore-errors
from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LAUNCH_WORDS = 16
RUN, PLAN, N, STOP, ARRIVED, TURN, ABORT, STOPPED, TRACE, CLOCK, PARKED = (64 * k for k in range(11))
SPINS, YIELDS, NAPS, NAP_US = 300, 500, 400, 50

sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_I64 = ir.IntType(64)
_PTR = _I64.as_pointer()


@intrinsic
def load(typing: Any, address: Any) -> Any:
    def code(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _PTR), "acquire", 8)

    return types.int64(types.int64), code


@intrinsic
def store(typing: Any, address: Any, value: Any) -> Any:
    def code(context: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store_atomic(args[1], b.inttoptr(args[0], _PTR), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:
    """Atomic: gives the value before."""

    def code(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _PTR), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def claim(typing: Any, address: Any, bit: Any) -> Any:
    """Atomic: sets a bit and gives the word before."""

    def code(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.atomic_rmw("or", b.inttoptr(args[0], _PTR), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def call(typing: Any, entry: Any, params: Any, begin: Any, end: Any) -> Any:
    def code(context: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 3)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that this is a spin."""
    name, args = ("llvm.x86.sse2.pause", []) if platform.machine() in ("x86_64", "AMD64") else ("llvm.aarch64.hint", [1])

    def code(context: Any, b: Any, sig: Any, _: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(args))
        fn = b.module.globals.get(name) or ir.Function(b.module, kind, name)
        b.call(fn, [ir.Constant(ir.IntType(32), a) for a in args])
        return context.get_dummy_value()

    return types.void(), code


@njit(nogil=True, error_model="numpy", forceinline=True)
def wait_change(address, old):
    """Spin, then yield, then sleep in small steps until the word is not `old`."""
    n = 0
    while load(address) == old:
        n += 1
        if n < SPINS:
            pause()
        elif n < SPINS + YIELDS:
            sched_yield()
        else:
            usleep(types.uint32(NAP_US))
    return load(address)


@njit(nogil=True, error_model="numpy", forceinline=True)
def finish(job, launch, phase):
    """What the last thread at the barrier does before it lets the others go on."""
    for k in range(phase + 1):
        store(launch + 64 - k * LAUNCH_WORDS * 8, 0)
    if load(job + TRACE) != 0:
        clock_gettime(types.int32(1), job + CLOCK)
        store(launch + 32, load(job + CLOCK) * 1000000000 + load(job + CLOCK + 8))
    if load(job + ABORT) != 0:
        store(job + STOPPED, load(job + RUN))


@njit(nogil=True, error_model="numpy", forceinline=True)
def barrier(job, launch, phase, n_threads):
    turn = load(job + TURN)
    if add(job + ARRIVED, 1) == n_threads - 1:
        finish(job, launch, phase)
        store(job + ARRIVED, 0)
        store(job + TURN, turn + 1)
    else:
        wait_change(job + TURN, turn)


@njit(nogil=True, error_model="numpy", forceinline=True)
def take_pieces(launch, tid, n_threads):
    """Pieces are neighbouring groups, claimed by a bit each. A thread begins at its own share and goes on in order, so that it reads memory
    in order, then helps the others."""
    entry, params, n_groups, most = load(launch), load(launch + 8), load(launch + 16), load(launch + 24)
    n_pieces = min(most, max(16, 4 * n_threads))
    at = tid * n_pieces // n_threads
    for _ in range(n_pieces):
        bit = 1 << at
        if load(launch + 64) & bit == 0 and claim(launch + 64, bit) & bit == 0:
            call(entry, params, at * n_groups // n_pieces, (at + 1) * n_groups // n_pieces)
        at = at + 1 if at + 1 < n_pieces else 0


@njit(nogil=True, error_model="numpy", forceinline=True)
def take_chain(launch, chain):
    if add(launch + 64, 1) == 0:
        for k in range(chain):
            at = launch + k * LAUNCH_WORDS * 8
            call(load(at), load(at + 8), 0, load(at + 16))


def walk(job, tid, n_threads):
    """Run the job's plan as one thread of the team; gives 1 if it was aborted between two launches."""
    run, launch, n, traced = load(job + RUN), load(job + PLAN), load(job + N), load(job + TRACE)
    end = launch + n * LAUNCH_WORDS * 8
    while launch < end:
        chain = 0 if traced != 0 else load(launch + 40)
        if chain > 0:
            take_chain(launch, chain)
            launch += (chain - 1) * LAUNCH_WORDS * 8
        else:
            take_pieces(launch, tid, n_threads)
        if traced != 0:
            barrier(job, launch, 0, n_threads)
        elif load(launch + 48) != 0:
            barrier(job, launch, load(launch + 56), n_threads)
        if load(job + STOPPED) == run:  # the run's number: a thread may look here when the next run has begun
            return 1
        launch += LAUNCH_WORDS * 8
    return 0


walk_native = njit(nogil=True, error_model="numpy")(walk)


def work(job, seen, tid, n_threads):
    """A worker: run each plan that comes. Gives the number of the last run when it parked, or -1 when the team is closed."""
    while True:
        n = 0
        while load(job + RUN) == seen:
            n += 1
            if n < SPINS:
                pause()
            elif n < SPINS + YIELDS:
                sched_yield()
            elif n < SPINS + YIELDS + NAPS:
                usleep(types.uint32(NAP_US))
            else:  # nothing to do for a while: sleep in Python, unless a run began just now
                add(job + PARKED + 64 * tid, 1)
                if load(job + RUN) == seen:
                    return seen
                store(job + PARKED + 64 * tid, 0)
        seen = load(job + RUN)
        if load(job + STOP) != 0:
            return -1
        walk_native(job, tid, n_threads)


def begin(job, plan, n):
    """Publish a plan: workers that spin see it at once, parked ones must be woken."""
    store(job + PLAN, plan)
    store(job + N, n)
    add(job + RUN, 1)
    return load(job + RUN)


def native() -> dict[str, tuple[Any, Any]]:
    """name -> (function, C signature)."""
    i = types.int64
    return {"walk": (walk, i(i, i, i)), "work": (work, i(i, i, i, i)), "begin": (begin, i(i, i, i))}
