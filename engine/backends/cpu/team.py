"""A team of threads that walks plans: Python threads inside native code without the GIL, woken for each run, re-made in a forked child."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.cpu.compile import _language_hash, link
from engine.errors import ClosedError, InterruptedRun, SettingError
from engine.object_cache import ObjectCache

MAX_THREADS = 1024
_I = ctypes.c_int64
_PROTOTYPES = {"walk": ctypes.CFUNCTYPE(_I, _I, _I, _I), "work": ctypes.CFUNCTYPE(_I, _I, _I, _I, _I),
               "begin": ctypes.CFUNCTYPE(_I, _I, _I, _I)}
_LINE = 8  # words of a cache line
_STOP, _ABORT, _TRACE, _PARKED = 3 * _LINE, 6 * _LINE, 8 * _LINE, 10 * _LINE


def allowed_threads() -> int:
    """Cores this process may use: CPU affinity and the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    for path in ("/sys/fs/cgroup/cpu.max",):
        try:
            quota, period = Path(path).read_text().split()[:2]
        except (OSError, ValueError):
            continue
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def thread_count(asked: int) -> int:
    """The request, 0 for all allowed cores. Raises SettingError outside 0 .. 1,024."""
    if not 0 <= asked <= MAX_THREADS:
        raise SettingError(f"{asked} threads: 1 to {MAX_THREADS:,} are possible (0 for all allowed cores)")
    return asked or allowed_threads()


class Native:
    """The compiled walker: `walk`, `work` and `begin` as C functions."""

    def __init__(self, cache: ObjectCache) -> None:
        here = Path(__file__).with_name("walker.py")
        key = hashlib.sha256(here.read_bytes() + _language_hash().encode()).hexdigest()
        for name, prototype in _PROTOTYPES.items():
            code = cache.get(f"{key}-{name}") or self._compile(cache, f"{key}-{name}", name)
            setattr(self, name, prototype(link(code, f"lanewise_{name}")))

    walk: Any
    work: Any
    begin: Any

    @staticmethod
    def _compile(cache: ObjectCache, key: str, name: str) -> bytes:
        from engine.backends.cpu.entry import c_object
        from engine.backends.cpu.walker import native

        function, signature = native()[name]
        code = c_object(function, signature, f"lanewise_{name}")
        cache.put(key, code)
        return code


class Team:
    """`n_threads` threads, the caller among them. One run at a time; `abort` may be called from any thread."""

    def __init__(self, n_threads: int, native: Native) -> None:
        self.n_threads, self.native = n_threads, native
        self._closed = False
        self._start()

    def _start(self) -> None:
        """Make the shared words and the workers; again in a forked child, where threads do not live on."""
        self._pid, self._lock = os.getpid(), threading.Lock()  # the parent's lock may be held by a thread that is not here
        raw = np.zeros(_PARKED + _LINE * (self.n_threads + 2), np.int64)
        self._job = raw[(-raw.ctypes.data % 64) // 8 :]
        self._wake = [threading.Event() for _ in range(self.n_threads)]
        self._state = _State(self._job, self._wake)
        weakref.finalize(self, _release, self._state)
        for tid in range(1, self.n_threads):
            threading.Thread(target=_worker, args=(self.native, self._state, tid, self.n_threads), daemon=True,
                             name=f"lanewise-{tid}").start()

    def run(self, plan: np.ndarray, n_launches: int, trace: bool = False) -> None:
        """Walk a plan of `n_launches`; returns when every launch is done.

        Raises:
            ClosedError: after `close()`.
            InterruptedRun: `abort()` was called; launches after some point did not run.
        """
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            if self._closed:
                raise ClosedError("the CPU team is closed")
            job = self._job
            job[_ABORT], job[_TRACE] = 0, int(trace)
            runs, at = int(job[0]), job.ctypes.data
            try:
                self.native.begin(at, plan.ctypes.data, n_launches)
                self._wake_parked()
            except BaseException:  # Ctrl-C just here: if the run has begun, the workers wait for this thread
                if job[0] != runs:
                    self._wake_parked()
                    self.native.walk(at, 0, self.n_threads)
                raise
            if self.native.walk(at, 0, self.n_threads):
                raise InterruptedRun("the run was interrupted")

    def _wake_parked(self) -> None:
        for tid in range(1, self.n_threads):
            if self._job[_PARKED + _LINE * tid]:
                self._job[_PARKED + _LINE * tid] = 0
                self._wake[tid].set()

    def abort(self) -> None:
        """Stop the run in progress after the launch it is at."""
        self._job[_ABORT] = 1

    def close(self) -> None:
        """Stop the workers. A run in progress ends first."""
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            self._closed = True
            _release(self._state)


class _State:
    """What workers share with the team; it outlives the team, since they may still be reading."""

    def __init__(self, job: np.ndarray, wake: list[threading.Event]) -> None:
        self.job, self.wake = job, wake


def _release(state: _State) -> None:
    state.job[_STOP] = 1
    state.job[0] += 1
    for event in state.wake:
        event.set()


def _worker(native: Native, state: _State, tid: int, n_threads: int) -> None:
    seen = 0
    while True:
        seen = native.work(state.job.ctypes.data, seen, tid, n_threads)
        if seen < 0:
            return
        state.wake[tid].wait()
        state.wake[tid].clear()
