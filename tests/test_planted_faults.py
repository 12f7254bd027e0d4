"""The suite finds what it is there to find: a right backend passes it, and one with a single planted fault does not."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backend import HostBuffer, KernelRow, KernelTable, Plan, Row
from engine.backends.cpu import CpuBackend
from engine.backends.sim import SimBackend
from engine.dtypes import Q8_0, Q8_X, RADIX
from engine.op import Call, Op, Step
from engine.tensor import Tensor
from engine.testing import (
    Disagreement,
    Example,
    FilteredBackend,
    Outcome,
    Report,
    check_call,
    check_claim,
    check_claims,
    check_example,
    check_graphs,
    conformance,
    elements,
)
from kernels import OPS

sys.path.insert(0, str(Path(__file__).parent / "plugin_example"))

from lanewise_numpy import KERNELS, HostRow, NumpyBackend, NumpyPlan  # noqa: E402  # found through the line above

Array = np.ndarray[Any, Any]
F32 = "f32"
EXAMPLES = 40


def outcome(backend: NumpyBackend, op: str, seed: int, examples: int = EXAMPLES) -> Outcome:
    """What the suite says of one op of the plug-in."""
    report = conformance(backend, [OPS[op]], examples=examples, seed=seed)
    (only,) = report.outcomes
    assert report.ok == (only.status == "ok")
    return only


def with_kernel(op: str, kernel: Callable[..., Array]) -> NumpyBackend:
    """The plug-in with another kernel for one op."""
    backend = NumpyBackend()
    backend.kernels = {**KERNELS, op: kernel}
    return backend


class Afterwards(NumpyBackend):
    """The right results, then `spoil` is done to the memory of the last step."""

    def __init__(self, spoil: Callable[[Step], None]) -> None:
        super().__init__()
        self.spoil = spoil

    def prepare(self, steps: Sequence[Step]) -> NumpyPlan:
        plan, spoil = super().prepare(steps), self.spoil

        class Spoilt(NumpyPlan):
            def run(self) -> None:
                before = plan.array(steps[-1].out).copy()
                plan.run()
                self.before = before
                spoil(steps[-1])

        spoilt = Spoilt(self, steps)
        return spoilt


@pytest.mark.parametrize("op", list(KERNELS))
def test_without_a_fault_nothing_is_found(op: str, run_seed: int) -> None:
    found = outcome(NumpyBackend(), op, run_seed)
    assert found.status == "ok" and found.n_calls == EXAMPLES, found


# -- what is written --------------------------------------------------------------------------------------------


class LastRowLeftOut(NumpyPlan):
    def run(self) -> None:
        for kernel, step in self.steps:
            out = self.array(step.out)
            result = kernel(*[self.array(t) for t in step.srcs if t is not None], **step.params).reshape(out.shape)
            if out.ndim > 1:
                out[..., :-1, :] = result[..., :-1, :]


def test_last_row_not_written(run_seed: int) -> None:
    backend = NumpyBackend()
    backend.prepare = lambda steps: LastRowLeftOut(backend, steps)  # type: ignore[method-assign]
    for op in ("add", "mul_mat", "rms_norm"):
        assert outcome(backend, op, run_seed).status == "mismatch", op


def past_the_end(step: Step) -> None:
    root = step.out.root
    assert isinstance(root.buffer, HostBuffer)
    memory = root.buffer.memory[root.buffer_offset + step.out.nbytes :][:4]
    memory[...] = np.frombuffer(np.float32(1).tobytes(), np.uint8)


def test_one_element_past_the_end_written(run_seed: int) -> None:
    for op in KERNELS:
        found = outcome(Afterwards(past_the_end), op, run_seed)
        assert found.status == "mismatch" and "memory that is not the result's" in found.reason, op


# -- what is read -----------------------------------------------------------------------------------------------


class ViewsAsDense(NumpyBackend):
    """Reads operands one element after the other, whatever their strides."""

    @staticmethod
    def array(t: Tensor) -> Array:
        buffer = t.root.buffer
        assert isinstance(buffer, HostBuffer)
        start = t.root.buffer_offset + t.root_offset
        return np.ndarray(t.shape, t.dtype.numpy, buffer.memory.data, start) if t.n_elements else buffer.array(t)


def test_a_view_treated_as_contiguous(run_seed: int) -> None:
    for op in ("add", "silu", "rms_norm", "mul_mat"):
        assert outcome(ViewsAsDense(), op, run_seed).status == "mismatch", op


def test_a_wrong_broadcast(run_seed: int) -> None:
    """Rows repeated one by one where they are to be repeated as a whole, in one dimension only."""

    def add(x: Array, w: Array) -> Array:
        w = w.reshape((1,) * (x.ndim - w.ndim) + w.shape)
        for axis, n in enumerate(x.shape):
            w = np.repeat(w, n // max(w.shape[axis], 1), axis)
        return x + w

    def mul_mat(w: Array, x: Array) -> Array:
        w, x = (a.reshape((1,) * (4 - a.ndim) + a.shape) for a in (w, x))
        times = [n // max(m, 1) for n, m in zip(x.shape[:2], w.shape[:2], strict=True)]
        return np.matmul(x, np.tile(w, [*times, 1, 1]).swapaxes(-1, -2))

    assert outcome(with_kernel("add", add), "add", run_seed, 100).status == "mismatch"
    assert outcome(with_kernel("mul_mat", mul_mat), "mul_mat", run_seed, 400).status == "mismatch"


# -- what is computed -------------------------------------------------------------------------------------------


def one_in_a_thousand(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """A relative error of 1e-2 in the last of each 1,000 elements, and nothing in smaller results."""

    def spoilt(*operands: Array, **params: Any) -> Array:
        out = np.array(kernel(*operands, **params))
        out.reshape(-1)[999::1000] *= np.float32(1.01)
        return out

    return spoilt


@pytest.mark.parametrize("op", list(KERNELS))
def test_a_relative_error_in_one_of_a_thousand_elements(op: str, run_seed: int) -> None:
    found = outcome(with_kernel(op, one_in_a_thousand(KERNELS[op])), op, run_seed, 200)
    assert found.status == "mismatch" and "1 of " in found.reason or " elements are wrong" in found.reason, found


def test_nan_where_the_reference_has_a_number(run_seed: int) -> None:
    def silu(x: Array) -> Array:
        return np.where(x == 0, np.float32(np.nan), KERNELS["silu"](x))

    def rms_norm(x: Array, eps: float) -> Array:  # the square overflows where the mean does not
        out = KERNELS["rms_norm"](x, eps)
        out[..., -1:] = np.where(np.abs(x[..., -1:]) > 1e4, np.nan, out[..., -1:])
        return out

    for op, kernel in (("silu", silu), ("rms_norm", rms_norm)):
        found = outcome(with_kernel(op, kernel), op, run_seed, 100)
        assert found.status == "mismatch" and "nan" in found.reason, op


# -- an overflow that only extreme codes show -------------------------------------------------------------------


class IntegerProduct(NumpyBackend):
    """MUL_MAT of Q8_0 with quantised activations; four products at a time are added up in integers of `width`."""

    def __init__(self, width: type[np.signedinteger[Any]]) -> None:
        super().__init__()
        self.table = KernelTable((), lanes=1, native={("mul_mat", ("q8_0", "q8_x", F32)): (HostRow(),)})
        self.kernels = {"mul_mat": lambda w, x: quantised_product(w, x, width)}


def quantised_product(w: Array, x: Array, width: type[np.signedinteger[Any]]) -> Array:
    w, x = (a.reshape((1,) * (4 - a.ndim) + a.shape) for a in (w, x))
    codes = np.ascontiguousarray(w["qs"]).view(np.int8).reshape(*w.shape, 8, 4).astype(np.int64)
    planes = np.ascontiguousarray(x["qs"]).view(np.int8).reshape(*x.shape, 2, 8, 4).astype(np.int64)
    w_scale, x_scale = w["d"].astype(np.float64)[..., 0], x["d"].astype(np.float64)[..., 0]
    out = np.zeros((*x.shape[:-1], w.shape[-2]), np.float32)
    for batch in np.ndindex(*x.shape[:-2]):
        from_w = tuple(i // (n // m) for i, n, m in zip(batch, x.shape[:-2], w.shape[:-2], strict=True))
        quads = np.einsum("mbqf,nbpqf->nmbpq", codes[from_w], planes[batch]).astype(width).astype(np.int64)
        exact = quads.sum(-1) @ np.array([RADIX, 1])
        out[batch] = np.einsum("nmb,mb,nb->nm", exact, w_scale[from_w], x_scale[batch])
    return out


def test_an_overflow_of_int16_that_only_extreme_codes_show(run_seed: int) -> None:
    assert outcome(IntegerProduct(np.int32), "mul_mat", run_seed).status == "ok"
    found = outcome(IntegerProduct(np.int16), "mul_mat", run_seed, 100)
    assert found.status == "mismatch", found
    rng = np.random.default_rng(run_seed)
    key = ("mul_mat", ("q8_0", "q8_x", F32))
    for _ in range(20):  # 4 * 63 * 127 is within int16: with smaller codes it looks right
        w, x = (elements(rng.standard_normal((3, 64)), t) for t in (Q8_0, Q8_X))
        check_call(IntegerProduct(np.int16), Example.of(OPS["mul_mat"], key, {"w": halved(w), "x": x}))


def halved(w: Array) -> Array:
    """Codes of half the size."""
    out = w.copy()
    codes = np.ascontiguousarray(w["qs"]).view(np.int8)
    out["qs"] = (codes // 2).view("<u4").reshape(w["qs"].shape)
    return out


# -- a lie in supports_op ---------------------------------------------------------------------------------------


class Liar(NumpyBackend):
    """Its table holds f16 weights too, which its kernels do not know, and half precision scales, which raise."""

    def __init__(self) -> None:
        super().__init__()
        lies: dict[Any, tuple[Row, ...]] = {("silu", ("f16", "f16")): (HostRow(),), ("add", (F32, "f16", F32)): (HostRow(),)}
        self.table = KernelTable((), lanes=1, native={**self.table.rows, **lies})

    def prepare(self, steps: Sequence[Step]) -> NumpyPlan:
        if any(t is not None and t.dtype.name == "f16" for s in steps for t in s.srcs):
            raise NotImplementedError("half precision")
        return super().prepare(steps)


def test_a_lie_in_supports_op_is_never_a_skip(run_seed: int) -> None:
    report = conformance(Liar(), [OPS["add"]], examples=10, seed=run_seed)
    assert not report.ok and report.counts == {"ok": 1, "broken": 1}
    assert "NotImplementedError: half precision" in str(report)
    with pytest.raises(Disagreement, match="claims to support this call"):
        check_claims(Liar(), OPS["add"], 40, run_seed)


def test_a_row_that_refuses_every_call_is_found(run_seed: int) -> None:
    class Never(HostRow):
        def refusal(self, call: Call) -> str | None:
            return "never today"

    backend = NumpyBackend()
    backend.table = KernelTable((), lanes=1, native={("silu", (F32, F32)): (Never(),)})
    found = outcome(backend, "silu", run_seed)
    assert found.status == "refused" and found.reason == "never today" and not found.n_calls


class Vague(KernelTable):
    """Refuses without saying what is wrong."""

    def first(self, call: Call, variant: str | None = None) -> tuple[Row | None, str, str]:
        row, name, why = super().first(call, variant)
        return row, name, why and "unsupported"


def test_a_refusal_names_the_first_requirement_that_is_not_met(run_seed: int) -> None:
    backend = NumpyBackend()
    assert check_claims(backend, OPS["add"], 60, run_seed)[1] > 0
    example = Example.of(OPS["add"], ("add", (F32, "i32", F32)), {"x": np.ones((2, 3), np.float32), "w": np.ones((2, 3), np.int32)})
    assert not check_claim(backend, example)
    backend.table = Vague((), lanes=1, native=backend.table.rows)
    with pytest.raises(Disagreement, match="without naming 'w is i32'"):
        check_claim(backend, example)


# -- a kernel in the language, and whole graphs -----------------------------------------------------------------


class Chosen(KernelTable):
    """Rows of another table; of one op only those with these names."""

    def __init__(self, table: KernelTable, op: Op, names: Sequence[str]) -> None:
        rows = {k: tuple(r for r in rows if k[0] != op.name or r.name in names) for k, rows in table.rows.items()}
        super().__init__((), table.lanes, native=rows)


def test_the_suite_runs_the_variant_it_names(cpu: CpuBackend) -> None:
    """A variant taken away from the table is missed: it was run before, not another in its place."""
    sim = SimBackend(OPS.values())
    before = {o.case.variant for o in conformance(sim, [OPS["add"]], examples=3).outcomes}  # type: ignore[union-attr]
    sim.table = Chosen(sim.table, OPS["add"], ["general"])
    after = {o.case.variant for o in conformance(sim, [OPS["add"]], examples=3).outcomes}  # type: ignore[union-attr]
    assert after == {"general"} < before
    assert all(isinstance(r, KernelRow) for r in sim.table.rows["add", (F32, F32, F32)])


class OffByOne(FilteredBackend):
    """Right kernels; the first element of each addition is then changed a little."""

    def prepare(self, steps: Sequence[Step]) -> Plan:
        inner = self.inner.prepare(steps)
        outs = [s.out for s in steps if s.op.name == "add"]

        class Spoilt(Plan):
            def run(self) -> None:
                inner.run()
                for t in outs:
                    assert isinstance(t.root.buffer, HostBuffer)
                    t.root.buffer.array(t)[..., :1] += np.float32(0.02)

        return Spoilt()


def test_whole_graphs_show_what_single_calls_show(cpu: CpuBackend, run_seed: int) -> None:
    assert check_graphs(cpu, cpu, OPS, 4, run_seed) > 0
    with pytest.raises(Disagreement, match="the result is not that of cpu alone"):
        check_graphs(OffByOne(cpu, lambda call: None, "off"), cpu, OPS, 40, run_seed)


# -- what a failure says ----------------------------------------------------------------------------------------


def test_a_failure_is_small_and_can_be_run_again(run_seed: int) -> None:
    """Shrunk to one element of the thousandth part, on a line that `lanewise check` takes, and the line fails in the same way."""

    def silu(x: Array) -> Array:
        return KERNELS["silu"](x) + (np.float32(1) if x.size >= 7 else 0)

    backend = with_kernel("silu", silu)
    found = outcome(backend, "silu", run_seed)
    command = shlex.split(found.reason.rpartition("again: ")[2])
    assert command[:4] == ["lanewise", "check", "-b", "numpy"] and command[4] == "--call"
    example = Example.parse(command[5], OPS)
    assert 7 <= np.prod(example.shapes["x"]) <= 8, "shrunk as far as the strategy's extents go"
    assert example.text == command[5]
    with pytest.raises(Disagreement):
        check_example(backend, example, command[7])
    check_example(NumpyBackend(), example, command[7])


def test_reports_repeat(run_seed: int) -> None:
    backend = with_kernel("silu", lambda x: x)
    one, two = (conformance(backend, [OPS["silu"]], seed=run_seed) for _ in range(2))
    assert one.outcomes == two.outcomes and not one.ok
    assert str(Report([])).startswith("0 ok") and not Report([]).ok, "nothing run is a failure"
