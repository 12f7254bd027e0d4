"""`lanewise show`: every form of a kernel's text, and refusals in one line."""

from __future__ import annotations

import pytest

from engine.cli import main


@pytest.mark.parametrize(("form", "sign"), [([], "for i in lanes(n):"), (["--llvm"], "@kernel("), (["--asm"], "kernel:"),
                                            (["--cl"], "__kernel"), (["--cuda"], "def each(first_group")])
def test_a_form_of_a_kernel_is_printed(form: list[str], sign: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "SILU", *form]) == 0
    assert sign in capsys.readouterr().out


def test_the_ptx_of_a_kernel_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba_cuda", reason="the extra cuda is not installed")
    assert main(["show", "silu", "--ptx"]) == 0
    assert ".visible .entry" in capsys.readouterr().out


def test_a_key_and_a_variant_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "mul_mat", "--key", "q4_k,q8_x", "--variant", "mul_mat_rows", "--cl"]) == 0
    assert "mul_mat_rows_kernel" in capsys.readouterr().out


@pytest.mark.parametrize(("args", "said"), [(["nope"], "there is no op 'nope'"), (["silu", "--key", "q4_0"], "has no key q4_0"),
                                            (["silu", "--variant", "x"], "has no variant 'x'"), (["silu", "--cl", "--ptx"], "not allowed")])
def test_what_is_not_there_is_said_in_one_line(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *args]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
