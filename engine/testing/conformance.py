"""A suite: every row of a backend's kernel table, on calls from strategies, with an outcome for each.

A call is compared with the float64 reference between guard bytes, then with what must be the same: the general kernel, the same call on
contiguous copies (bit for bit), in place (bit for bit), and other backends.
"""

from __future__ import annotations

import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, assume, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable

from engine.backend import Backend, BufferType, DeviceType, KernelRow, KernelTable, ThroughRow
from engine.dtypes import DTYPES
from engine.op import Key, Op
from engine.testing.example import Example
from engine.testing.limits import Disagreement, assert_agree, assert_same_bits
from engine.testing.run import InterleavedBufferType, check_call, refusal, run_guarded
from engine.testing.strategies import examples as calls_of

STATUSES = ("ok", "mismatch", "refused", "broken")
BUDGET, SLOW_BUDGET = 20_000, 1_000  # places of a launch; TEST devices may run a kernel as text


@dataclass(frozen=True)
class Case:
    """One row of a kernel table, to be tested: an op, a key, a variant, and operands that variant wants interleaved."""

    op: Op
    key: Key
    variant: str
    packed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op.name}-{'-'.join(self.key[1])}-{self.variant}"

    @property
    def block_size(self) -> int:
        """The largest block of its types."""
        return max(DTYPES[t].block_size for t in self.key[1])

    def memory(self, backend: Backend, extra: Sequence[BufferType] = ()) -> BufferType | None:
        """Weight memory in the layout this variant reads, None where it reads the file's.

        Raises:
            LookupError: the backend has no such memory.
        """
        if not self.packed:
            return None
        dtype = DTYPES[self.key[1][[o.name for o in self.op.contract.views].index(self.packed[0])]]
        want = f"lanes{backend.table.lanes}"
        own = [InterleavedBufferType(backend.table.lanes)] if backend.buffer_type.is_host else []
        return next(_found(t for t in (*extra, *backend.weight_types, *own) if t.layout_of(dtype) == want))


def _found(types: Iterable[BufferType]) -> Iterator[BufferType]:
    yield from types
    raise LookupError("no memory with the layout this variant reads")


def cases(table: KernelTable, ops: Iterable[Op]) -> list[Case]:
    """Every row of a backend's table for these ops."""
    out: dict[Case, None] = {}
    for op in ops:
        for key in table.keys_of(op):
            for row in table.rows[key]:
                for inner in row.inner if isinstance(row, ThroughRow) else (row,):
                    packed = tuple(inner.variant.layouts) if isinstance(inner, KernelRow) else ()
                    out[Case(op, key, inner.name, packed)] = None
    return list(out)


def general_variant(table: KernelTable, key: Key) -> str:
    """The last row of a key: the one that takes every call, from the file's layout."""
    last = table.rows[key][-1]
    return last.inner[-1].name if isinstance(last, ThroughRow) else last.name


def in_rotation(cases: Iterable[Case], seed: int | str) -> list[Case]:
    """One key of each (op, block size), another for each seed, with all its variants: what a device is tested with at every commit."""
    groups: dict[tuple[str, int], dict[Key, list[Case]]] = {}
    for case in cases:
        groups.setdefault((case.op.name, case.block_size), {}).setdefault(case.key, []).append(case)
    rng = random.Random(f"{seed}")
    return [case for keys in groups.values() for case in keys[rng.choice(sorted(keys))]]


@dataclass(frozen=True)
class Outcome:
    """What became of a case, after how many calls, and why.

    "ok", "mismatch" (a wrong result), "broken" (a claim that then failed: anything but a result), "refused" (every call was, so it has
    never run), or "left out" by whoever asked. What is no row of a table has a name instead of a case.
    """

    case: Case | str
    status: str
    n_calls: int = 0
    reason: str = ""


@dataclass
class Report:
    """Outcomes of a suite. Nothing run is a failure, and so is a case that never ran."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        return Counter(o.status for o in self.outcomes)

    @property
    def ok(self) -> bool:
        return self.counts["ok"] > 0 and not any(self.counts[s] for s in STATUSES[1:])

    def __str__(self) -> str:
        counts = self.counts
        line = ", ".join([f"{counts[s]} {s}" for s in STATUSES] + [f"{counts[s]} {s}" for s in ("left out",) if counts[s]])
        return "\n".join([f"{line}; {sum(o.n_calls for o in self.outcomes)} calls",
                          *(f"{o.case}: {o.status}: {o.reason}" for o in self.outcomes if o.status in STATUSES[1:])])


def conformance(backend: Backend, ops: Iterable[Op], *, examples: int = 10, seed: int = 0, budget: int = 0,
                weights: Sequence[BufferType] = (), only: Callable[[Case], bool] = lambda case: True,
                peers: Sequence[Backend] = (), tell: Callable[[Outcome], None] = lambda outcome: None) -> Report:
    """Run every row of the backend's table on `examples` calls each, and say what became of it.

    Args:
        seed: repeats a run exactly.
        budget: about the most places a call may have; 0 for what suits the device.
        weights: memory with layouts, beside the backend's own.
        only: leaves cases out.
        peers: backends whose results are compared with this one's, where they take the call.
        tell: is given each outcome as it comes.
    """
    report = Report()
    for case in cases(backend.table, ops):
        outcome = check_case(backend, case, examples, seed, budget, weights, peers) if only(case) else Outcome(case, "left out")
        report.outcomes.append(outcome)
        tell(outcome)
    return report


def check_case(backend: Backend, case: Case, examples: int = 10, seed: int = 0, budget: int = 0, weights: Sequence[BufferType] = (),
               peers: Sequence[Backend] = ()) -> Outcome:
    """Run one row on `examples` calls. A failing call shrinks to a small one, whose reason tells how to run it again."""
    try:
        memory = case.memory(backend, weights)
    except LookupError as why:
        return Outcome(case, "refused", reason=str(why))
    trial = _Trial(backend, case, memory, peers)
    budget = budget or (SLOW_BUDGET if backend.device.type is DeviceType.TEST else BUDGET)
    outcome = trial.run(examples, seed, budget)
    return outcome if outcome.status != "refused" else trial.run(examples, seed, 10 * budget, large=True)


def check_example(backend: Backend, example: Example, variant: str | None = None, memory: BufferType | None = None,
                  peers: Sequence[Backend] = ()) -> None:
    """Everything that is compared, for one call. Raises Disagreement, or whatever a backend that breaks raises."""
    got = check_call(backend, example, variant, memory)
    general = general_variant(backend.table, example.key)
    if variant and variant != general and not refusal(backend, example, general):
        assert_agree(example, got, run_guarded(backend, example, general)[0], f"the variant {general}")
    if any(example.layouts.values()) and not refusal(backend, example.dense(), variant, memory):
        assert_same_bits(example, got, run_guarded(backend, example.dense(), variant, memory)[0], "contiguous copies")
    if example.op.inplace and not example.layouts.get(example.op.inplace):
        over, guards = run_guarded(backend, example, variant, memory, in_place=True)
        if not guards.intact:
            raise Disagreement(f"{example}\nin place, memory that is not the result's was changed: {', '.join(guards.changed)}")
        assert_same_bits(example, got, over, "the result in memory of its own")
    for peer in peers:
        if not refusal(peer, example):
            assert_agree(example, got, run_guarded(peer, example)[0], peer.name)


def again(backend: Backend, example: Example, variant: str | None) -> str:
    """The command that runs this very call again, or nothing where its data was given."""
    if not example.text:
        return ""
    return f"lanewise check -b {backend.name} --call {shlex.quote(example.text)}" + (f" --variant {variant}" if variant else "")


class _Trial:
    """One case on calls that a seed decides."""

    def __init__(self, backend: Backend, case: Case, memory: BufferType | None, peers: Sequence[Backend]) -> None:
        self.backend, self.case, self.memory, self.peers = backend, case, memory, peers
        self.n_calls = 0
        self.refusals: list[str] = []
        self.failing: Example | None = None

    def run(self, n: int, seed: int, budget: int, large: bool = False) -> Outcome:
        strategy = calls_of(self.case.op, self.case.key, lanes=self.backend.table.lanes, budget=budget, whole=self.case.packed, large=large)

        @seeded(seed)
        @settings(max_examples=n, deadline=None, database=None, phases=(Phase.generate, Phase.shrink), print_blob=False,
                  suppress_health_check=list(HealthCheck), report_multiple_bugs=False, verbosity=Verbosity.quiet)
        @given(example=strategy)
        def check(example: Example) -> None:
            self._one(example)

        try:
            check()
        except Unsatisfiable:
            pass
        except Disagreement as why:
            return self._outcome("mismatch", f"{why}")
        except Exception as why:  # a suite reports whatever a backend does
            return self._outcome("broken", f"{type(why).__name__}: {why}")
        if self.n_calls:
            return Outcome(self.case, "ok", self.n_calls)
        return Outcome(self.case, "refused", reason=self.refusals[0] if self.refusals else "no call was generated")

    def _one(self, example: Example) -> None:
        if why := refusal(self.backend, example, self.case.variant, self.memory):
            self.refusals.append(why)
            assume(False)
        self.n_calls += 1
        self.failing = example
        check_example(self.backend, example, self.case.variant, self.memory, self.peers)
        self.failing = None

    def _outcome(self, status: str, why: str) -> Outcome:
        """The last call that failed is the smallest: Hypothesis ends with it."""
        told = again(self.backend, self.failing, self.case.variant) if self.failing else ""
        return Outcome(self.case, status, self.n_calls, f"{why}\nagain: {told}" if told else why)
