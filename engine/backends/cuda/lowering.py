"""Every row of the kernel table compiled without a GPU: to PTX for each compute capability, to a cubin where there is an assembler."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from engine.backend import KernelRow, Row
from engine.backends.cuda import compile as toolchain
from engine.backends.cuda.compile import Capability, Resources
from engine.backends.cuda.compiler import program_of
from engine.backends.cuda.table import CudaTable
from engine.calls import a_call
from engine.errors import KernelError
from engine.lang.binding import Binding, bind
from engine.op import Call, Key, Op, Variant

LANES = 32
CallFor = Callable[[Op, Key, Variant], "Call | None"]


@dataclass(frozen=True)
class CompileResult:
    """One kernel of one row for one compute capability.

    Attributes:
        launch: the kernel's name; a row may have two.
        reason: why it failed, empty where it did not.
        resources: None where no assembler is installed.
    """

    op: str
    key: Key
    variant: str
    launch: str
    capability: Capability
    reason: str = ""
    ptx_nbytes: int = 0
    resources: Resources | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def name(self) -> str:
        return f"{'-'.join((self.op, *self.key[1]))}-{self.variant} ({self.launch}) sm_{self.capability[0]}{self.capability[1]}"

    def row(self) -> dict[str, object]:
        """As `lanewise check` prints it."""
        used = self.resources
        return {"name": self.name, "status": "ok" if self.ok else "broken", "reason": self.reason, "PTX bytes": self.ptx_nbytes or None,
                "registers": used and used.registers, "local bytes": used and used.local_nbytes,
                "shared bytes": used and used.shared_nbytes, "seconds": round(self.seconds, 3)}

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: failed: {self.reason}"
        used = self.resources
        took = f", {used.registers} registers, {used.local_nbytes} bytes of local memory a thread" if used else ""
        return f"{self.name}: {self.ptx_nbytes} bytes of PTX{took}"


def compile_only(ops: Iterable[Op], keys: Collection[Key] | None = None, ccs: tuple[Capability, ...] = ((8, 0), (9, 0)), *,
                 lanes: int = LANES, calls: CallFor | None = None, only: Callable[[Op, Key, str], bool] = lambda op, key, variant: True,
                 ) -> Iterator[CompileResult]:
    """Lower and compile each key and variant of the table; a kernel that several rows share is compiled once and reported for each.

    Args:
        keys: the keys wanted, all by default.
        calls: gives a call that a variant takes; by default small shapes are tried.
        only: leaves rows out.
    """
    table = CudaTable(ops := tuple(ops), lanes)
    done: dict[object, list[CompileResult]] = {}
    for op in ops:
        for key in table.keys_of(op):
            if keys is not None and key not in keys:
                continue
            for row in _own_rows(table.rows[key]):
                if only(op, key, row.name):
                    yield from _row(row, key, (calls or (lambda o, k, v: a_call(o, k, v, lanes)))(op, key, row.variant), ccs, done)


def _own_rows(rows: Iterable[Row]) -> Iterator[KernelRow]:
    """Rows that convert an operand first are made of rows of another key."""
    return (r for r in rows if isinstance(r, KernelRow))


def _row(row: KernelRow, key: Key, call: Call | None, ccs: tuple[Capability, ...], done: dict[object, list[CompileResult]],
         ) -> Iterator[CompileResult]:
    if call is None:
        for cc in ccs:
            yield CompileResult(row.op.name, key, row.name, row.variant.kernel.name, cc, "no call was found that this row takes")
        return
    for binding in bind(call, row.variant):
        same = binding.identity
        if same not in done:
            done[same] = list(_compiled(row, key, binding, ccs))
        for r in done[same]:
            yield CompileResult(row.op.name, key, row.name, r.launch, r.capability, r.reason, r.ptx_nbytes, r.resources, r.seconds)


def _compiled(row: KernelRow, key: Key, binding: Binding, ccs: tuple[Capability, ...]) -> Iterator[CompileResult]:
    started, launch = time.perf_counter(), binding.function.name
    try:
        texts = toolchain.ptx(program_of(binding), ccs)
    except KernelError as why:
        yield from (CompileResult(row.op.name, key, row.name, launch, cc, str(why)) for cc in ccs)
        return
    except Exception as why:  # Numba's and NVVM's own
        reason = " ".join(str(why).split())[:500] or type(why).__name__
        yield from (CompileResult(row.op.name, key, row.name, launch, cc, reason) for cc in ccs)
        return
    for cc, text in zip(ccs, texts, strict=True):
        reason, used = _assembled(text, cc)
        yield CompileResult(row.op.name, key, row.name, launch, cc, reason, len(text), used, (time.perf_counter() - started) / len(ccs))


def _assembled(text: str, capability: Capability) -> tuple[str, Resources | None]:
    if toolchain.assembler() is None:
        return "", None
    try:
        return "", toolchain.resources(toolchain.cubin(text, capability), toolchain.entry_of(text))
    except Exception as why:  # nvJitLink's own
        return " ".join(str(why).split())[:500] or type(why).__name__, None
