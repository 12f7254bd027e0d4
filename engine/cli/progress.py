"""What is said on stderr while kernels are compiled: a bar on a terminal, one line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from engine.backend import Backend
from engine.settings import settings

_WHAT = "compiling kernels for this machine, once"


class Progress:
    """Shows what the compilers of some backends do, from the first kernel that is missing in the cache on.

    Use it in `with`. `check` is called before each kernel and may raise, to stop.
    """

    def __init__(self, backends: Iterable[Backend], check: Callable[[], None] = lambda: None) -> None:
        self._compilers = [c for b in backends if (c := getattr(b, "compiler", None)) is not None]
        self._check = check
        self._done = 0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        for compiler in self._compilers:
            compiler.on_compile = self._next
        return self

    def __exit__(self, *_: object) -> None:
        for compiler in self._compilers:
            compiler.on_compile = None
        self.stop()

    def stop(self) -> None:
        """Take the bar away; another kernel brings it back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _next(self, left: int, name: str) -> None:
        self._check()
        if sys.stderr.isatty():
            self._draw(left, name)
        elif not self._done:
            sys.stderr.write(f"lanewise: {_WHAT}; they are kept in {settings().cache_dir}\n")
        self._done += 1

    def _draw(self, left: int, name: str) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        if self._bar is None:
            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(_WHAT)
            self._bar.start()
        self._bar.update(self._task, completed=self._done, total=self._done + left, description=f"{_WHAT}: {name}")
