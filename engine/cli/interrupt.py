"""Ctrl-C while a model runs.

Python runs signal handlers between two bytecodes of the main thread, and that thread is inside native code while a plan runs. So the signal
also wakes a small thread, through the wake-up file descriptor, and that one tells the context to stop.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from engine.errors import InterruptedRun
from engine.model import Context


class Interrupts:
    """In `with`: Ctrl-C stops the run of `context` at its next node, and `check` raises KeyboardInterrupt.

    The handler itself raises nothing, so that no step of the engine is cut in two; a second Ctrl-C does.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.asked = False
        self._noticed = threading.Event()
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupts:
        if self._is_main:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._watcher = threading.Thread(target=self._watch, name="lanewise-interrupt", daemon=True)
            self._watcher.start()
            self._fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._handler: Any = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._noticed.set()
        if self._is_main:
            signal.signal(signal.SIGINT, self._handler)
            signal.set_wakeup_fd(self._fd)
            os.close(self._writer)
            self._watcher.join()
            os.close(self._reader)
        if isinstance(error, InterruptedRun):
            raise KeyboardInterrupt from error

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.asked:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def _watch(self) -> None:
        while signals := os.read(self._reader, 64):
            if signal.SIGINT in signals:
                self._context.interrupt()
                while not self._noticed.wait(0.02):  # again, for a run that began just then
                    self._context.interrupt()
