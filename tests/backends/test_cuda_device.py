"""The CUDA backend on machines without a GPU: why it is absent, that nothing is loaded, and how launches are laid out."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.backends.cuda import CudaBackend, device
from engine.backends.cuda.compiler import Compiler, Kernel
from engine.backends.cuda.device import Gpu, find_gpus, too_old
from engine.backends.cuda.memory import CudaBuffer, CudaBufferType
from engine.backends.cuda.plan import Launch, build, parameters
from engine.backends.cuda.table import alignment_of, misplaced
from engine.dtypes import F32, I8, IQ4_NL, Q4_0, Q4_K
from engine.errors import AllocationError, DeviceError
from engine.lang.binding import bind
from engine.object_cache import ObjectCache
from engine.op import Call, Step
from engine.registry import Registry
from engine.tensor import Tensor, leaf
from kernels import OPS

# -- absence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver, toolkit, assembler, said", [
    ((13, 0), (13, 5), (13, 5), None), ((13, 5), (13, 5), None, None), ((14, 0), (13, 5), (13, 5), None),
    ((12, 4), (13, 5), (13, 5), "the NVIDIA driver supports CUDA 12.4, the installed toolkit makes code for CUDA 13.5: update the driver, "
                                "or install `numba-cuda[cu12]` in place of `numba-cuda[cu13]`"),
    ((13, 0), (13, 5), None, "the NVIDIA driver supports CUDA 13.0, the installed toolkit makes PTX for CUDA 13.5, and no assembler is "
                             "there: update the driver, or `pip install 'nvidia-nvjitlink==13.*'`"),
    ((13, 0), None, None, "there is no CUDA toolkit (libNVVM and NVRTC are not found): `pip install 'lanewise[cuda]'`")])
def test_a_driver_that_is_too_old_is_told_with_both_versions(driver: Any, toolkit: Any, assembler: Any, said: str | None) -> None:
    assert too_old(driver, toolkit, assembler) == said


def absent(monkeypatch: pytest.MonkeyPatch, load: Any = None, spec: object = object()) -> str:
    monkeypatch.setattr(device, "cuda_simulator", lambda: False)
    monkeypatch.setattr(device, "find_spec", lambda name: spec)
    monkeypatch.setattr(device.ctypes, "CDLL", load or (lambda name: None))
    with pytest.raises(DeviceError) as why:
        find_gpus()
    return str(why.value)


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_a_missing_package_and_a_missing_driver_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert absent(monkeypatch, spec=None) == "numba-cuda is not installed: `pip install 'lanewise[cuda]'`"
    assert absent(monkeypatch, no_library) == ("there is no NVIDIA driver (libcuda.so.1 is not on this machine): install the driver of the "
                                               "GPU")


def driven(monkeypatch: pytest.MonkeyPatch, *, version: Any = (13, 5), count: int = 1, capability: Any = (9, 0)) -> None:
    """numba.cuda on a machine with GPUs, as far as finding them goes."""
    pytest.importorskip("numba_cuda")
    from numba.cuda.cudadrv import driver

    def told() -> Any:
        if isinstance(version, Exception):
            raise version
        return version

    gpus = [SimpleNamespace(compute_capability=capability) for _ in range(count)]
    monkeypatch.setattr(driver, "driver", SimpleNamespace(get_version=told, get_device_count=lambda: count))
    monkeypatch.setattr(device, "library", lambda: SimpleNamespace(gpus=gpus))
    monkeypatch.setattr(device, "toolkit_version", lambda: (13, 5))


@pytest.mark.parametrize("name, error", [("CUDA_ERROR_OUT_OF_MEMORY", AllocationError), ("CUDA_ERROR_ILLEGAL_ADDRESS", DeviceError)])
def test_what_the_driver_reports_is_an_error_of_ours(name: str, error: type[Exception]) -> None:
    theirs = type("CudaAPIError", (Exception,), {"__module__": "numba.cuda.cudadrv.driver"})
    with pytest.raises(error, match="copying 4 bytes"), device.typed("cuda:0", "copying 4 bytes"):
        raise theirs(f"[2] Call to cuMemAlloc results in {name}")
    with pytest.raises(ZeroDivisionError), device.typed("cuda:0", "copying 4 bytes"):
        raise ZeroDivisionError


def test_a_driver_without_a_gpu_and_gpus_that_are_too_old_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driven(monkeypatch, count=0)
    assert "finds no GPU" in absent(monkeypatch)
    driven(monkeypatch, count=2, capability=(6, 1))
    assert absent(monkeypatch) == "GPU 0 has compute capability 6.1; GPU 1 has compute capability 6.1: 7.5 or newer is needed"
    driven(monkeypatch, version=(12, 8))
    assert "12.8" in absent(monkeypatch)
    driven(monkeypatch, version=RuntimeError("\nError at driver init:\nCUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"))
    assert absent(monkeypatch) == "the NVIDIA driver does not start: Error at driver init:"


def test_each_gpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driven(monkeypatch, count=3)
    monkeypatch.setattr(device, "cuda_simulator", lambda: False)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: None)
    assert [gpu.name for gpu in find_gpus()] == ["cuda:0", "cuda:1", "cuda:2"]


def test_the_registry_keeps_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_simulator", lambda: False)
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    found = Registry([], found=[SimpleNamespace(name="cuda", load=lambda: CudaBackend)])
    assert [(u.name, u.reason) for u in found.unavailable] == [("cuda", "numba-cuda is not installed: `pip install 'lanewise[cuda]'`")]


def test_importing_the_engine_and_its_backends_loads_no_numba_cuda() -> None:
    text = ("import sys, engine, engine.runtime, engine.backends.cuda\n"
            "print([m for m in sys.modules if m.split('.')[0] in ('numba', 'cuda') or m.startswith('numba.cuda')])")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]" and not done.stderr


# -- what a GPU cannot take -------------------------------------------------------------------------------------


def call_of(node: Tensor) -> Call:
    return Call.of(Step.of(node), {}, 32)


def test_elements_at_odd_places_are_refused_with_the_reason() -> None:
    bytes_ = leaf(I8, (64,), "bytes")
    odd = Tensor(F32, (4,), name="odd", view_of=bytes_, offset=2, strides=(4,))
    strided = Tensor(F32, (2, 4), name="strided", view_of=bytes_, strides=(18, 4))
    assert misplaced(call_of(OPS["silu"](odd))) == "operand x has elements at steps of 2 bytes: a GPU reads f32 at multiples of 4"
    assert "steps of 18 bytes" in misplaced(call_of(OPS["silu"](strided)))
    assert not misplaced(call_of(OPS["silu"](leaf(F32, (3, 4), "x")[1:, 1:])))


def test_blocks_lie_at_multiples_of_their_largest_field() -> None:
    assert [alignment_of(leaf(t, (256,), "w")) for t in (Q4_0, Q4_K, IQ4_NL, F32)] == [2, 4, 2, 4]


# -- launches ---------------------------------------------------------------------------------------------------


class FakeGpu(Gpu):
    """A GPU whose memory has addresses only, and which keeps what is launched."""

    def __init__(self) -> None:
        super().__init__(0)
        self.n_processors, self.capability = 2, (9, 0)  # type: ignore[misc]
        self.launched: list[tuple[Any, ...]] = []

    def current(self, doing: str) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def launch(self, kernel: Any, blocks: int, threads: tuple[int, int], arguments: int) -> None:
        self.launched.append((kernel, blocks, threads, arguments))


class Handed(Compiler):
    """A compiler that hands out kernels without compiling."""

    def _ready(self, asked: Any, program: Any) -> bool:
        self._kernels[asked] = Kernel(program, program.name)
        return True


class LoadingGpu(FakeGpu):
    """A GPU that takes code, unless it is told to refuse some."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 0

    def load(self, code: bytes, entry: str) -> Any:
        assert code.startswith(b"\x7fELF") or f".entry {entry}".encode() in code
        if self.refusals:
            self.refusals -= 1
            raise DeviceError("CUDA_ERROR_INVALID_IMAGE")
        return entry


def on(gpu: FakeGpu, t: Tensor, address: int) -> Tensor:
    t.buffer = CudaBuffer(CudaBufferType(gpu), device.Memory(gpu, None, address, 1 << 20), "compute")
    return t


def test_a_launch_hands_over_pointers_to_its_parameters() -> None:
    gpu = FakeGpu()
    x = on(gpu, leaf(F32, (10, 16), "x"), 4096)
    node = on(gpu, OPS["scale"](x[:, 2:], factor=0.5, bias=-1.0), 8192)
    call = Call.of(Step.of(node), {}, 32)
    (binding,) = bind(call, OPS["scale"].variants[-1])
    plan = build([Launch(Step.of(node), "general", binding)], Handed(gpu, ObjectCache(None)), max_blocks=2)
    plan.run()
    assert [(k, blocks, threads) for k, blocks, threads, _ in gpu.launched] == [("scaled", 2, (32, 4)), ("scaled", 1, (32, 4))]
    values = []
    for *_, arguments in gpu.launched:
        n = len(plan.parts[0].values)
        pointers = (ctypes.c_uint64 * n).from_address(arguments)
        values.append([ctypes.c_int64.from_address(p).value for p in pointers])
    x_strides, y_strides = [0, 0, 64, 4], [0, 0, 56, 4]
    assert values[0][:13] == [0, 10, 4104, *x_strides, 8192, *y_strides, 1] and values[1][0] == 8
    assert np.array(values[0][-2:], np.int64).view(np.float32)[::2].tolist() == [0.5, -1.0]


def test_machine_code_is_kept_between_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("numba_cuda")
    gpu = LoadingGpu()
    x = on(gpu, leaf(F32, (2, 8), "x"), 4096)
    bindings = bind(Call.of(Step.of(on(gpu, OPS["rms_norm"](x), 8192)), {}, 32), OPS["rms_norm"].variants[-1])
    told = []
    first = Compiler(gpu, ObjectCache(tmp_path), on_compile=lambda left, name: told.append((left, name)))
    (kernel,) = first.kernels(bindings)
    assert kernel.code == "lanewise_kernel" and first.kernels([*bindings, *bindings]) == [kernel, kernel]
    assert (first.compiled, first.loaded, told) == (1, 0, [(1, "rms_norm")])
    second = Compiler(gpu, ObjectCache(tmp_path))
    second.kernels(bindings)
    assert (second.compiled, second.loaded) == (0, 1)
    gpu.refusals = 1  # as after another driver
    third = Compiler(gpu, ObjectCache(tmp_path))
    third.kernels(bindings)
    assert (third.compiled, third.loaded) == (1, 0) and "cannot be used" in caplog.text
    gpu.capability = (8, 0)  # type: ignore[misc]
    other = Compiler(gpu, ObjectCache(tmp_path))
    other.kernels(bindings)
    assert other.compiled == 1, "code of another GPU was taken"


def test_scratch_memory_has_an_address_of_its_own() -> None:
    gpu = FakeGpu()
    op = OPS["flash_attn_ext"]
    from engine.backends.cuda.lowering import a_call

    call = a_call(op, op.keys()[0], op.variants[-1], 32)
    assert call is not None
    for k, t in enumerate(call.tensors.values()):
        if t is not None:
            on(gpu, t.root, 4096 * (k + 1))
    first, second = bind(call, op.variants[-1])
    scratch = device.Memory(gpu, None, 1 << 30, 1 << 16)
    assert 1 << 30 in parameters(first, 0, scratch) and 1 << 30 in parameters(second, 0, scratch)
