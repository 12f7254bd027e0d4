"""What kernels become for a GPU, without one: PTX for two compute capabilities, and a cubin where an assembler is installed."""

from __future__ import annotations

import random
import re

import pytest

pytest.importorskip("numba_cuda")

from engine.backend import KernelTable  # noqa: E402
from engine.backends.cuda import CudaBackend, compile_only  # noqa: E402
from engine.backends.cuda import compile as toolchain  # noqa: E402
from engine.backends.cuda.compiler import ENTRY, machine_code, program_of  # noqa: E402
from engine.backends.cuda.printer import Program  # noqa: E402
from engine.calls import a_call  # noqa: E402
from engine.dtypes import DTYPES  # noqa: E402
from engine.lang.binding import bind  # noqa: E402
from engine.op import Key, Op  # noqa: E402
from engine.testing.conformance import cases, in_rotation  # noqa: E402
from kernels import OPS  # noqa: E402

HOPPER = (9, 0)


def program(op: str, *types: str, variant: str = "general", lanes: int = 32) -> Program:
    chosen = OPS[op]
    key = next(k for k in chosen.keys() if k[1][: len(types)] == types)
    row = next(v for v in chosen.variants if v.name == variant)
    call = a_call(chosen, key, row, lanes)
    assert call is not None
    return program_of(bind(call, row)[0])


def ptx(*args: str, **kw: object) -> str:
    return toolchain.ptx(program(*args, **kw), (HOPPER,))[0]  # type: ignore[arg-type]


@pytest.mark.timeout(900)
def test_keys_in_rotation_compile_for_both_capabilities(run_seed: int, request: pytest.FixtureRequest) -> None:
    """One key of each (op, block size); the interleaved products of large blocks, whose text is long, one at a time."""
    table = KernelTable(OPS.values(), 32)
    wanted = {(c.op.name, c.key, c.variant) for c in in_rotation(cases(table, OPS.values()), run_seed) if not _is_long(c.key, c.variant)}
    long = sorted({(c.op.name, c.key, c.variant) for c in cases(table, OPS.values()) if _is_long(c.key, c.variant)})
    wanted.add(random.Random(run_seed).choice(long))
    every = request.config.option.all_keys
    results = list(compile_only(OPS.values(), only=lambda op, key, variant: every or (op.name, key, variant) in wanted))
    failed = [str(r) for r in results if not r.ok]
    assert not failed, "\n".join(failed)
    assert {r.capability for r in results} == {(8, 0), (9, 0)} and len({r.op for r in results}) == len(OPS)
    assert all(r.ptx_nbytes > 500 for r in results)
    if toolchain.assembler():
        spilled = [str(r) for r in results if r.resources is None or r.resources.local_nbytes or not 8 <= r.resources.registers <= 255]
        assert not spilled, "\n".join(spilled)


def _is_long(key: Key, variant: str) -> bool:
    return variant.startswith("mul_mat_rows") and DTYPES[key[1][0]].block_size > 32


def test_nothing_is_contracted_and_nothing_is_double() -> None:
    text = ptx("scale", "f32")
    assert "mul.rn.f32" in text and "add.rn.f32" in text and "fma" not in text and ".f64" not in text


def test_memory_is_read_in_the_global_space_and_sums_are_shuffled() -> None:
    text = ptx("rms_norm", "f32")
    assert "ld.global.f32" in text and "st.global.f32" in text and not re.search(r"\b(ld|st)\.(f32|u32|u8|local)", text)
    assert text.count("shfl.sync.bfly") == 5 and "bar.sync" not in text


def test_more_lanes_than_a_warp_meet_in_shared_memory() -> None:
    text = ptx("rms_norm", "f32", lanes=128)
    assert text.count("shfl.sync.bfly") == 5 and text.count("bar.sync") == 4 and "ld.shared" in text


@pytest.mark.parametrize("type, form", [("q4_0", "dp4a.u32.s32"), ("q8_0", "dp4a.s32.s32"), ("q6_k", "dp4a.u32.s32")])
def test_integer_products_are_one_instruction(type: str, form: str) -> None:
    assert form in ptx("mul_mat", type, "q8_x", variant="mul_mat_along_k")


def test_words_of_blocks_that_lie_at_even_places_are_read_in_halves() -> None:
    assert "load_u32_by2" in program("mul_mat", "q4_0", "q8_x", variant="mul_mat_along_k").kernel
    assert "load_u32_by2" not in program("mul_mat", "q4_k", "q8_x", variant="mul_mat_along_k").kernel


def test_machine_code_has_one_entry_of_a_known_name() -> None:
    code = machine_code(program("silu", "f32"), HOPPER)
    if toolchain.assembler():
        assert code.startswith(b"\x7fELF") and toolchain.resources(code, ENTRY).registers > 0
    else:
        assert toolchain.entry_of(code.decode()) == ENTRY


def test_a_failure_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Program, capabilities: object) -> list[str]:
        raise RuntimeError("no such\n instruction")

    monkeypatch.setattr(toolchain, "ptx", refuse)
    rows = list(CudaBackend.compile_only([OPS["rms_norm"]], lambda name: name == "rms_norm-f32-f32-general"))
    assert [row["status"] for row in rows] == ["broken"] * 2 and rows[0]["reason"] == "no such instruction"
    assert rows[0]["name"] == "rms_norm-f32-f32-general (rms_norm) sm_80"


def test_a_row_without_a_call_is_told() -> None:
    def none(op: Op, key: Key, variant: object) -> None:
        return None

    results = list(compile_only([OPS["silu"]], calls=none))
    assert results and all(r.reason == "no call was found that this row takes" for r in results)
