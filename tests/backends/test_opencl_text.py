"""The OpenCL C of one key of every op, kept as text, so that a change of the printer or of a kernel shows in review.

`pytest tests/backends/test_opencl_text.py --update-golden` writes the files again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backend import KernelRow, KernelTable
from engine.backends.opencl.printer import print_program
from engine.calls import a_call
from engine.lang.binding import bind
from engine.op import Op
from kernels import OPS

FOLDER = Path(__file__).parents[1] / "golden" / "opencl"
LANES = 32


def text_of(op: Op) -> str:
    """The launches of the general kernel of an op's first key, on small shapes."""
    key = op.keys()[0]
    row = KernelTable([op], LANES).rows[key][-1]
    assert isinstance(row, KernelRow)
    call = a_call(op, key, row.variant, LANES)
    assert call is not None
    texts = []
    for b in bind(call, row.variant):
        texts.append(print_program(b.kernel(), f"{b.function.name}_kernel"))
    return f"// {op.name}({', '.join(key[1])}), {row.name}, {LANES} lanes\n\n" + "\n".join(texts)


@pytest.mark.parametrize("name", OPS)
def test_the_text_is_what_it_was(name: str, request: pytest.FixtureRequest) -> None:
    file, text = FOLDER / f"{name}.cl", text_of(OPS[name])
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.is_file(), f"{name} has no text yet: run with --update-golden"
    assert text == file.read_text(encoding="utf-8"), "the text has changed: run with --update-golden, and look at the difference"


def test_no_file_is_left_of_an_op_that_is_gone() -> None:
    assert {f.stem for f in FOLDER.glob("*.cl")} == set(OPS)
