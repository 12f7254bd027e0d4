"""One device's queue: memory, copies in both directions, events. Everything given to a queue runs in order."""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import Any
from weakref import WeakSet

import numpy as np

from engine.backend import Backend, Event
from engine.backends.opencl.devices import Found, library, typed
from engine.errors import AllocationError, ClosedError

COPY_NBYTES = 64 << 20  # larger copies are cut: drivers hold a copy of what they are given
MIN_NBYTES = 16  # of an allocation, and what sizes are rounded up to
PENDING = 64  # copies whose host memory is kept alive before finished ones are looked for


class Memory:
    """A piece of device memory, freed when nobody refers to it or when its stream is closed."""

    def __init__(self, stream: Stream, cl: Any, nbytes: int) -> None:
        self.stream, self.nbytes, self._cl = stream, nbytes, cl

    @property
    def cl(self) -> Any:
        if self._cl is None:
            raise ClosedError(f"the OpenCL backend {self.stream.name} is closed, and its memory is gone")
        return self._cl

    def release(self) -> None:
        if self._cl is not None:
            self._cl.release()
            self._cl = None


class Stream:
    """An in-order queue, made when it is first needed.

    Attributes:
        name: the device's, for messages.
    """

    def __init__(self, found: Found) -> None:
        self.found, self.name = found, found.device.name
        self.is_closed = False
        self._memories: WeakSet[Memory] = WeakSet()
        self._pending: deque[tuple[Any, Any]] = deque()  # events, and what must stay alive until then

    @property
    def context(self) -> Any:
        return self.found.shared.context

    @cached_property
    def _queue(self) -> Any:
        with typed(self.name, "making a queue"):
            return library().CommandQueue(self.context, self.found.cl)

    @property
    def queue(self) -> Any:
        if self.is_closed:
            raise ClosedError(f"the OpenCL backend {self.name} is closed")
        return self._queue

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Memory:
        """Zeroed memory of the device.

        Raises:
            AllocationError: more than one buffer may have, or more than the device has.
        """
        if nbytes < 0:
            raise AllocationError(f"{self.name} cannot allocate {nbytes} bytes: a size >= 0 is expected")
        limit = self.found.cl.max_mem_alloc_size
        if nbytes > limit:
            raise AllocationError(f"{self.name} has buffers of at most {limit} bytes; {nbytes} were asked for: use a shorter context (-c), "
                                  "a smaller batch (-ub) or another device")
        cl, queue = library(), self.queue
        size = min(-(-max(nbytes, 1) // MIN_NBYTES) * MIN_NBYTES, limit)
        with typed(self.name, f"allocating {nbytes} bytes"):
            made = Memory(self, cl.Buffer(self.context, cl.mem_flags.READ_WRITE, size), nbytes)
            _fill(queue, made.cl, size)
            queue.flush()
        self._memories.add(made)
        return made

    # -- copies -------------------------------------------------------------------------------------------------

    def write(self, memory: Memory, at: int, data: np.ndarray, *, wait: bool = True) -> None:
        """Bring uint8 [n] to byte `at`. Without `wait` the data must stay as it is until this point of the queue is reached."""
        cl, queue = library(), self.queue
        with typed(self.name, f"copying {data.nbytes} bytes to the device"):
            for k in range(0, data.nbytes, COPY_NBYTES):
                part = data[k : k + COPY_NBYTES]
                self._keep(cl.enqueue_copy(queue, memory.cl, part, dst_offset=at + k, is_blocking=wait), part, wait)

    def read(self, memory: Memory, at: int, out: np.ndarray, *, wait: bool = True) -> None:
        """Fill `out`, uint8 [n], from byte `at`. Without `wait` it has its content when this point of the queue is reached."""
        cl, queue = library(), self.queue
        with typed(self.name, f"copying {out.nbytes} bytes from the device"):
            for k in range(0, out.nbytes, COPY_NBYTES):
                part = out[k : k + COPY_NBYTES]
                self._keep(cl.enqueue_copy(queue, part, memory.cl, src_offset=at + k, is_blocking=wait), part, wait)

    def move(self, source: Memory, at: int, target: Memory, to: int, nbytes: int) -> None:
        """Queue a copy between two pieces of memory of one context."""
        cl, queue = library(), self.queue
        with typed(self.name, f"copying {nbytes} bytes on the device"):
            for k in range(0, nbytes, COPY_NBYTES):
                n = min(COPY_NBYTES, nbytes - k)
                event = cl.enqueue_copy(queue, target.cl, source.cl, byte_count=n, src_offset=at + k, dst_offset=to + k)
                self._keep(event, (source, target), done=False)
            queue.flush()

    def _keep(self, event: Any, what: Any, done: bool) -> None:
        if done:
            return
        self._pending.append((event, what))
        complete = library().command_execution_status.COMPLETE
        while len(self._pending) > PENDING and self._pending[0][0].command_execution_status == complete:
            self._pending.popleft()

    # -- order --------------------------------------------------------------------------------------------------

    def mark(self) -> Any:
        """An event behind the work so far, on its way to the device."""
        with typed(self.name, "recording an event"):
            marker = library().enqueue_marker(self.queue)
            self.queue.flush()
            return marker

    def wait_for(self, event: Any) -> None:
        """Work given from now on starts after an event of the same context."""
        with typed(self.name, "waiting for an event"):
            library().enqueue_barrier(self.queue, wait_for=[event])

    def finish(self) -> None:
        """Wait until everything is done."""
        if "_queue" not in self.__dict__ and not self.is_closed:
            return  # nothing was ever given
        with typed(self.name, "running"):
            self.queue.finish()
        self._pending.clear()

    def close(self) -> None:
        """Wait, and give the memory back."""
        if self.is_closed:
            return
        try:
            self.finish()
        finally:
            self.is_closed = True
            for memory in list(self._memories):
                memory.release()
            self._pending.clear()
            self.__dict__.pop("_queue", None)


def _fill(queue: Any, memory: Any, size: int) -> None:
    """Zeros, in a pattern of several bytes as far as it goes: drivers are slow with one of one byte."""
    cl, whole = library(), size // MIN_NBYTES * MIN_NBYTES
    cl.enqueue_fill_buffer(queue, memory, np.zeros(MIN_NBYTES, np.uint8), 0, whole)
    if size > whole:
        cl.enqueue_fill_buffer(queue, memory, np.zeros(1, np.uint8), whole, size - whole)


class OpenCLEvent(Event):
    """A marker in a queue."""

    def __init__(self, backend: Backend, stream: Stream) -> None:
        super().__init__(backend)
        self.stream, self.cl = stream, stream.mark()

    def wait(self) -> None:
        with typed(self.stream.name, "waiting for an event"):
            self.cl.wait()
