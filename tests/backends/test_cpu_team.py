# ruff: noqa: F821 (kernels: free names are constants)
"""The team of threads: any size finishes, sleeps when idle, survives fork, abort and close, and serves one run at a time."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.backend import HOST, HostBuffer, place
from engine.backends.cpu import CpuBackend
from engine.backends.cpu.plan import CpuPlan
from engine.backends.cpu.team import Native, Team, allowed_threads, thread_count
from engine.dtypes import F32
from engine.errors import ClosedError, InterruptedRun, SettingError
from engine.graph import Graph
from engine.lang.words import f32, fma
from engine.op import Op, Step
from engine.sched.execute import Executable
from engine.settings import override
from engine.tensor import Tensor, leaf
from kernels import OPS

ROOT = Path(__file__).parents[2]
ROWS = 500


def flip(row, x, y, rows):
    y[row] = x[rows - 1 - row] + 1.0


def toil(row, x, y, rows):
    v = f32(1)
    for _ in range(TURNS):
        v = fma(v, f32(0.5), f32(1))
    y[row] = x[row] + 1.0 + v * 0.0


def op_of(kernel: Any, work: int, **constants: int) -> Op:
    op = Op(kernel.__name__, "x[rows] -> y[rows]", params={}, flop=lambda call: work)
    op.variant("rows", name="general", constants=constants)(kernel)
    return op


FLIP = op_of(flip, 10**6)  # big enough for a barrier of its own
SMALL = op_of(flip, 0)  # runs in a chain
TOIL = op_of(toil, 10**6, TURNS=4000)


class Chain:
    """A plan in which each launch needs all of the one before: what it writes is wrong if a barrier does not hold."""

    def __init__(self, cpu: CpuBackend, n_launches: int, op: Op = FLIP, rows: int = ROWS) -> None:
        self.x = self._memory(leaf(F32, (rows,), "x"))
        self.array(self.x)[:] = np.arange(rows)
        self.nodes: list[Tensor] = []
        for _ in range(n_launches):
            self.nodes.append(self._memory(op(self.nodes[-1] if self.nodes else self.x)))
        self.plan: CpuPlan = cpu.prepare([Step.of(n) for n in self.nodes])

    @staticmethod
    def _memory(t: Tensor) -> Tensor:
        return place(t, HOST.allocate(t.nbytes))

    @staticmethod
    def array(t: Tensor) -> np.ndarray:
        assert isinstance(t.buffer, HostBuffer)
        return t.buffer.array(t)

    def clear(self) -> None:
        for n in self.nodes:
            self.array(n)[:] = -1

    def check(self) -> None:
        """Run from a clean state, and look at the last result."""
        self.clear()
        self.plan.run()
        flipped = self.array(self.x) if len(self.nodes) % 2 == 0 else self.array(self.x)[::-1]
        assert np.array_equal(self.array(self.nodes[-1]), flipped + len(self.nodes))


def backend(threads: int) -> CpuBackend:
    return CpuBackend([FLIP, TOIL], threads=threads)


@pytest.fixture
def cpu() -> Iterator[CpuBackend]:
    made = backend(3)
    yield made
    made.close()


# -- any number of threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 33])
def test_a_team_of_any_size_finishes(threads: int) -> None:
    cpu = backend(threads)
    for op in (FLIP, SMALL):
        for n_launches in (1, 2, 25):
            chain = Chain(cpu, n_launches, op)
            for _ in range(4):
                chain.check()
    cpu.close()


def test_fewer_groups_than_threads() -> None:
    cpu = backend(5)
    for rows in (1, 2, 4, 257):
        Chain(cpu, 6, rows=rows).check()
    cpu.close()


def test_independent_launches_and_chains_in_one_plan(cpu: CpuBackend) -> None:
    """Large launches that do not depend on each other, small ones in between, and one that reads them all in turn."""
    a, b = Chain(cpu, 7), Chain(cpu, 6, SMALL)
    mixed = [n for pair in zip(a.nodes, b.nodes, strict=False) for n in pair] + a.nodes[6:]
    plan = cpu.prepare([Step.of(n) for n in mixed])
    for _ in range(50):
        a.clear()
        b.clear()
        plan.run()
        assert np.array_equal(a.array(a.nodes[-1]), a.array(a.x)[::-1] + 7)
        assert np.array_equal(b.array(b.nodes[-1]), b.array(b.x) + 6)


def test_many_short_runs(cpu: CpuBackend) -> None:
    chain = Chain(cpu, 1, rows=3)
    for k in range(3000):
        chain.x.buffer.array(chain.x)[0] = k  # type: ignore[union-attr]
        chain.plan.run()
        assert chain.array(chain.nodes[0])[2] == k + 1


def test_a_plan_of_nothing(cpu: CpuBackend) -> None:
    cpu.prepare([]).run()
    empty = Chain(cpu, 2, rows=0)
    empty.plan.run()


def test_a_traced_run_has_the_time_of_each_launch(cpu: CpuBackend) -> None:
    chain = Chain(cpu, 9)
    started = time.monotonic_ns()
    chain.plan.run(trace=True)
    ends = chain.plan.ends_ns
    assert len(ends) == 9 and started <= ends[0] and ends == sorted(ends) and ends[-1] <= time.monotonic_ns()
    chain.check()


# -- idle workers -----------------------------------------------------------------------------------------------


def test_parked_workers_are_woken(cpu: CpuBackend) -> None:
    chain = Chain(cpu, 5)
    for _ in range(8):
        chain.check()
        time.sleep(0.12)
    chain.check()


def test_an_idle_team_uses_no_processor(cpu: CpuBackend) -> None:
    Chain(cpu, 5).check()
    time.sleep(0.5)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.1


# -- abort, Ctrl-C, close ---------------------------------------------------------------------------------------


def test_abort_stops_a_long_plan_and_the_next_run_works(cpu: CpuBackend) -> None:
    long, short = Chain(cpu, 400, TOIL, rows=1000), Chain(cpu, 5)
    long.clear()
    timer = threading.Timer(0.05, cpu.team.abort)
    timer.start()
    with pytest.raises(InterruptedRun):
        long.plan.run()
    timer.join()
    done = [k for k, n in enumerate(long.nodes) if long.array(n)[-1] != -1]
    assert done == list(range(len(done))) and 0 < len(done) < 400
    short.check()
    partly = cpu.prepare([Step.of(n) for n in long.nodes[:3]])
    long.clear()
    partly.run()
    assert np.array_equal(long.array(long.nodes[2]), np.arange(1000) + 3)


def test_abort_without_a_run_is_no_harm(cpu: CpuBackend) -> None:
    chain = Chain(cpu, 3)
    cpu.team.abort()
    chain.check()


RACE = """
    import random, sys, threading, time
    sys.path.insert(0, "{tests}")
    from test_cpu_team import Chain, backend
    from engine.errors import InterruptedRun

    cpu = backend(int(sys.argv[1]))
    chain, over = Chain(cpu, 20), threading.Event()

    def nag():
        while not over.is_set():
            cpu.team.abort()
            time.sleep(random.random() * 0.0005)

    nagging = threading.Thread(target=nag)
    nagging.start()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        try:
            chain.check()
        except InterruptedRun:
            pass
    over.set()
    nagging.join()
    chain.check()
"""


@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.slow
def test_a_run_right_after_an_abort_is_never_mixed_up_with_it(threads: int) -> None:
    script = textwrap.dedent(RACE).format(tests=Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, str(threads)], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_between_the_start_and_the_walk_leaves_no_worker_behind(cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(cpu, 6)
    chain.check()

    class Interrupted:
        def __init__(self, native: Native, after: bool) -> None:
            self.native, self.after, self.walk, self.work = native, after, native.walk, native.work

        def begin(self, *args: int) -> int:
            if self.after:
                self.native.begin(*args)
            raise KeyboardInterrupt

    for after in (True, False):
        with monkeypatch.context() as m:
            m.setattr(cpu.team, "native", Interrupted(cpu.team.native, after))
            with pytest.raises(KeyboardInterrupt):
                chain.plan.run()
        for _ in range(20):
            chain.check()


def test_a_real_ctrl_c_reaches_python_when_the_run_is_over(cpu: CpuBackend) -> None:
    chain = Chain(cpu, 60, TOIL, rows=1000)
    timer = threading.Timer(0.03, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with SIGINT ignored
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            chain.plan.run()
            time.sleep(1)  # if the run was over before the signal came
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    Chain(cpu, 5).check()


def test_a_closed_team_refuses_and_ends_its_threads() -> None:
    team = Team(4, backend(1).team.native)
    name = {t.name for t in threading.enumerate()}
    assert {"lanewise-1", "lanewise-2", "lanewise-3"} <= name
    workers = [t for t in threading.enumerate() if t.name.startswith("lanewise-")]
    team.close()
    team.close()
    with pytest.raises(ClosedError, match="closed"):
        team.run(np.zeros(16, np.int64), 1)
    ours = workers[-3:]
    for t in ours:
        t.join(5)
    assert not any(t.is_alive() for t in ours)


def test_a_forgotten_team_ends_its_threads() -> None:
    before = set(threading.enumerate())
    team = Team(3, backend(1).team.native)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 2
    del team
    gc.collect()
    for t in workers:
        t.join(5)
    assert not any(t.is_alive() for t in workers)


# -- several callers --------------------------------------------------------------------------------------------


def test_two_python_threads_on_one_team_are_served_one_after_the_other(cpu: CpuBackend) -> None:
    chains, errors = [Chain(cpu, 7), Chain(cpu, 4, rows=90)], []

    def work(chain: Chain) -> None:
        try:
            for _ in range(150):
                chain.check()
        except BaseException as why:  # noqa: BLE001
            errors.append(why)

    threads = [threading.Thread(target=work, args=(c,)) for c in chains]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads) and not errors


def test_a_run_from_another_thread_uses_the_whole_team() -> None:
    """Numba's own layers forget the number of threads there."""
    cpu = backend(3)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: (Chain(cpu, 2).check(), seen.append(cpu.team.n_threads)))
    thread.start()
    thread.join(60)
    assert seen == [3]
    cpu.close()


def in_child(work: Any) -> int:
    """Fork, run `work` in the child, and give its exit status; a child that hangs is ended."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_team_again(cpu: CpuBackend) -> None:
    chain = Chain(cpu, 6)
    chain.check()
    assert in_child(chain.check) == 0
    chain.check()
    assert in_child(lambda: (chain.check(), chain.check(), cpu.close())) == 0
    chain.check()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_runs_a_plan(cpu: CpuBackend) -> None:
    long, short = Chain(cpu, 100, TOIL, rows=1000), Chain(cpu, 5)
    short.check()
    running = threading.Thread(target=long.plan.run)
    running.start()
    time.sleep(0.02)
    assert in_child(short.check) == 0
    running.join(60)
    assert np.array_equal(long.array(long.nodes[-1]), np.arange(1000) + 100)


# -- how many ---------------------------------------------------------------------------------------------------


def test_limits_of_the_thread_count() -> None:
    assert thread_count(0) == allowed_threads() >= 1
    assert (thread_count(1), thread_count(1024)) == (1, 1024)
    for wrong in (1025, -1):
        with pytest.raises(SettingError, match=f"{wrong} threads: 1 to 1,024"):
            thread_count(wrong)
        with pytest.raises(SettingError):
            CpuBackend([], threads=wrong)


def test_the_setting_counts_unless_a_number_is_asked() -> None:
    with override(threads=7):
        assert CpuBackend([]).n_threads == 7
        assert CpuBackend([], threads=2).n_threads == 2


AFFINITY = """
    import os, sys, time
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.path.insert(0, sys.argv[1])
    from test_cpu_team import Chain, backend
    from engine.backends.cpu import CpuBackend
    from engine.backends.cpu.team import allowed_threads

    print(allowed_threads(), CpuBackend([]).n_threads)

    def seconds(threads):
        cpu = backend(threads)
        chain, best = Chain(cpu, 40), 9e9
        chain.check()
        for _ in range(30):
            started = time.perf_counter()
            chain.plan.run()
            best = min(best, time.perf_counter() - started)
        cpu.close()
        return best

    alone, crowded = seconds(1), seconds(4)
    print(crowded < 20 * alone + 0.02)
"""


def test_affinity_is_honoured_and_more_threads_than_cores_still_finish() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(AFFINITY), str(Path(__file__).parent)],
                          env={**os.environ, "PYTHONPATH": str(ROOT), "LANEWISE_THREADS": "0"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["1 1", "True"]


def test_a_closed_backend_runs_no_plan() -> None:
    backend = CpuBackend(list(OPS.values()))
    node = OPS["silu"](engine.array(np.ones(4, np.float32)))
    with Executable([backend], Graph([node])) as run:
        run.run()
        backend.close()
        with pytest.raises(ClosedError, match="closed"):
            run.run()
