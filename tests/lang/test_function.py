"""Functions of the language made inside a Python function: one text, many ops."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from engine.backends.cpu import CpuBackend
from engine.backends.cpu.compile import Request
from engine.backends.cpu.words import Features
from engine.backends.sim import SimBackend
from engine.dtypes import F16, F32
from engine.lang.function import Function
from engine.lang.tree import ViewType
from engine.lang.words import function, lanes
from engine.op import Op, op
from engine.testing import Example, check_call, run_guarded


@function
def doubled(v):  # type: ignore[no-untyped-def]
    return v + v


@function
def squared(v):  # type: ignore[no-untyped-def]
    return v * v


def made(name: str, f: Function, BIAS: float = 0.0) -> Op:
    @op("x[n] -> y[n]", groups="one", name=name, types={"x": (F32, F16)}, result="x", variant={"sizes": {"one": lambda call: 1}})
    def each(one, x, y, n):  # type: ignore[no-untyped-def]
        for i in lanes(n):
            y[i] = f(x[i]) + BIAS

    return each


TWICE, SQUARE, MORE = made("twice", doubled), made("square", squared), made("more", squared, 1.5)


def request(made: Op) -> Request:
    view = ViewType(F32, 1)
    kernel, constants = made.variants[0].kernel, MappingProxyType({"LANES": 8})
    return Request(kernel, {"x": view, "y": view}, ("one",), ("n",), (), constants, Features(8, frozenset()))


def test_one_text_means_what_it_was_made_with() -> None:
    x = np.arange(-5, 6, dtype="f4")
    cpu, sim = CpuBackend([TWICE, SQUARE, MORE], threads=1), SimBackend([TWICE, SQUARE, MORE], lanes=4)
    for made_, want in ((TWICE, x + x), (SQUARE, x * x), (MORE, x * x + 1.5)):
        example = Example.of(made_, (made_.name, ("f32", "f32")), {"x": x})
        for backend in (cpu, sim):
            assert run_guarded(backend, example)[0].tolist() == want.tolist()
    cpu.close()


def test_what_it_was_made_with_is_part_of_its_key() -> None:
    """The disk cache must not give one op the machine code of another."""
    assert len({request(made_).key() for made_ in (TWICE, SQUARE, MORE, made("more", squared, 2.5))}) == 4
    assert request(made("again", squared)).key() == request(SQUARE).key()
    assert [r.variants[0].kernel.label for r in (TWICE, SQUARE)] == ["each[doubled]", "each[squared]"]


def test_the_type_of_the_result_follows_an_operand() -> None:
    assert TWICE.keys() == [("twice", ("f32", "f32")), ("twice", ("f16", "f16"))]
    TWICE.reference(lambda x: x + x)
    cpu = CpuBackend([TWICE], threads=1)
    got = check_call(cpu, Example.of(TWICE, ("twice", ("f16", "f16")), {"x": np.array([1, 2.5, 60000], "f2")}))
    assert got.dtype == np.float16 and got.tolist() == [2, 5, np.inf]
    cpu.close()


def test_a_whole_number_serves_where_a_float_is_meant() -> None:
    from engine.tensor import leaf
    from kernels.arithmetic import scaled

    node = scaled(leaf(F32, (4,), "x"), factor=2)
    assert node.params == {"factor": 2.0, "bias": 0.0} and isinstance(node.params["factor"], float)
