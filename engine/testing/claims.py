"""`supports_op` under test: what a backend claims, it runs; what it refuses, it gives the first requirement that is not met for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from engine.backend import Backend, BufferType, DeviceType, KernelTable
from engine.dtypes import BF16, F16, F32, I32, Q4_0, DType
from engine.errors import ShapeError
from engine.op import Key, Op
from engine.tensor import Tensor
from engine.testing.conformance import BUDGET, SLOW_BUDGET, again
from engine.testing.example import Example
from engine.testing.limits import Disagreement
from engine.testing.run import check_call, node_of
from engine.testing.strategies import examples

FOREIGN = (F32, F16, BF16, I32, Q4_0)  # types that an operand is given beside those its op declares


@st.composite
def any_calls(draw: Callable[..., Any], table: KernelTable, op: Op, budget: int, packed: bool) -> Example:
    """A call of `op` with the right shapes, and with the types of a key or of any kind."""
    known = table.keys_of(op)
    key: Key = draw(st.one_of(st.sampled_from(known), _keys(op)) if known else _keys(op))
    whole = [o.name for o in op.contract.operands] if packed else ()
    made: Example = draw(examples(op, key, lanes=table.lanes, budget=budget, whole=whole))
    return made


def _keys(op: Op) -> st.SearchStrategy[Key]:
    pools: list[list[DType]] = [[*op.types[o.name], *op.types[o.name], *FOREIGN] for o in op.contract.operands]
    if not op.contract.writes:
        pools.append(list(op.types[op.contract.result.name]))
    return st.tuples(*map(st.sampled_from, pools)).map(lambda types: (op.name, tuple(t.name for t in types)))


def check_claims(backend: Backend, op: Op, examples: int = 20, seed: int = 0, budget: int = 0) -> tuple[int, int]:
    """Draw calls of `op` with any types and layouts; each is run if it is claimed, and has a good reason if it is refused.

    Returns:
        How many were claimed, and how many refused.

    Raises:
        Disagreement: a claim that failed, or a reason that is none.
    """
    counts = {True: 0, False: 0}
    memories = [t for t in backend.weight_types if t is not backend.buffer_type]
    places = st.sampled_from([None, None, *memories])
    budget = budget or (SLOW_BUDGET if backend.device.type is DeviceType.TEST else BUDGET)

    @seeded(seed)
    @settings(max_examples=examples, deadline=None, database=None, phases=(Phase.generate, Phase.shrink), print_blob=False,
              suppress_health_check=list(HealthCheck), report_multiple_bugs=False, verbosity=Verbosity.quiet)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        memory = data.draw(places)
        example = data.draw(any_calls(backend.table, op, budget, memory is not None))
        counts[check_claim(backend, example, memory)] += 1

    check()
    return counts[True], counts[False]


def check_claim(backend: Backend, example: Example, memory: BufferType | None = None) -> bool:
    """Ask for one call and hold the backend to its answer, which is returned. Raises Disagreement."""
    try:
        node, leaves = node_of(example)
    except ShapeError:  # no such call: nobody is asked
        return False
    if node.dtype is not example.result_dtype:
        return False
    as_if = {t: memory for t in leaves if memory is not None and memory.layout_of(t.dtype) != "plain"}
    answer = backend.supports(node, as_if)
    if answer:
        _run_claimed(backend, example, memory, answer.variant)
    elif wrong := _wrong_reason(backend.table, node, as_if, answer.reason):
        raise Disagreement(f"{example}\n{backend.name} refuses this call, {wrong}: {answer.reason!r}")
    return bool(answer)


def _run_claimed(backend: Backend, example: Example, memory: BufferType | None, variant: str) -> None:
    try:
        check_call(backend, example, None, memory)
    except Exception as why:
        told = f"{why}" if isinstance(why, Disagreement) else f"{example}\n{type(why).__name__}: {why}"
        repeat = again(backend, example, variant.rpartition(" + ")[2] if memory is not None else None)
        raise Disagreement(f"{told}\n{backend.name} claims to support this call, by {variant}\nagain: {repeat}") from why


def _wrong_reason(table: KernelTable, node: Tensor, as_if: Mapping[Tensor, BufferType], reason: str) -> str:
    """What is wrong with a reason for refusing `node`, or nothing: it is one line, and names the first requirement that is not met."""
    if not reason.strip() or "\n" in reason:
        return "without a reason of one line"
    call = table.call(node, as_if)
    first = first_wrong_type(table, call.op, call.types)
    if first and first not in reason:
        return f"without naming {first!r}"
    return ""


def first_wrong_type(table: KernelTable, op: Op, types: Iterable[str]) -> str:
    """The first operand whose type no key of the table has behind the types before it, as "w is q4_0"; nothing where a key fits."""
    keys = [key[1] for key in table.keys_of(op)]
    if not keys:
        return f"no kernel for {op.name}"
    for i, (o, t) in enumerate(zip(op.contract.views, types, strict=True)):
        name = t if t != "-" else op.types[o.name][0].name
        fitting = [k for k in keys if k[i] == name]
        if not fitting:
            return f"{o.name} is {name}"
        keys = fitting
    return ""
