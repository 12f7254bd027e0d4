"""Which OpenCL devices there are, what they are called, and why there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backend import DeviceType
from engine.backends.opencl import OpenCLBackend
from engine.backends.opencl import devices as module
from engine.backends.opencl.devices import device_type, find_devices, pci_address, typed
from engine.errors import AllocationError, DeviceError
from engine.registry import Registry
from engine.settings import override
from kernels import OPS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pocl() -> str:
    """The name of PoCL's device."""
    try:
        return next(f.device.name for f in find_devices() if "PoCL" in f.device.description)
    except (DeviceError, StopIteration):
        pytest.skip("PoCL is not installed: pip install 'lanewise[pocl]'")


def asked(drivers: Path | None = None, **environment: str) -> dict[str, Any]:
    """What a fresh process says of OpenCL: devices, or the reason why there is none. `drivers` takes the place of all installed ones."""
    elsewhere = f"import os, pyopencl\nos.environ['PYOPENCL_HOME'] = {str(drivers)!r}\n" if drivers else ""
    if drivers:
        environment["OCL_ICD_VENDORS"] = str(drivers)
    code = (f"{elsewhere}import json\nfrom engine.backends.opencl.devices import find_devices\nfrom engine.errors import DeviceError\n"
            "try:\n    print(json.dumps({'ids': {f.device.name: f.device.id for f in find_devices()}}))\n"
            "except DeviceError as why:\n    print(json.dumps({'reason': str(why)}))")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# -- what there is ----------------------------------------------------------------------------------------------


def test_a_device_says_what_it_is(pocl: str) -> None:
    found = next(f for f in find_devices() if f.device.name == pocl)
    d = found.device
    assert d.type is DeviceType.CPU and d.total and d.total > 1 << 28
    assert d.capabilities.asynchronous and d.capabilities.events and not d.capabilities.mmap
    assert "compute unit" in d.description and d.id.startswith("Portable Computing Language/")
    assert d.id == next(f for f in find_devices() if f.device.name == pocl).device.id
    assert "PoCL" in found.driver


def test_cpu_devices_are_used_only_when_named(pocl: str) -> None:
    points = [SimpleNamespace(name="cpu", load=_cpu), SimpleNamespace(name="opencl", load=lambda: OpenCLBackend)]
    registry = Registry(OPS.values(), found=points)
    assert pocl in [b.name for b in registry.all] and pocl not in [b.name for b in registry.backends]
    assert [b.name for b in registry.select(pocl)] == [pocl, "cpu"]
    registry.close()


def _cpu() -> object:
    from engine.backends.cpu import CpuBackend

    return CpuBackend


def test_parts_are_devices_of_their_own(pocl: str) -> None:
    units = next(f for f in find_devices() if f.device.name == pocl).cl.max_compute_units
    if units < 2:
        pytest.skip(f"{pocl} has {units} compute unit")
    with override(opencl_subdevices=2):
        parts = [f for f in find_devices() if f.device.name.startswith(pocl)]
    assert [p.device.name for p in parts] == [f"{pocl}.0", f"{pocl}.1"]
    assert len({p.device.id for p in parts}) == 2 and [p.cl.max_compute_units for p in parts] == [units // 2] * 2
    assert parts[0].shared.context is parts[1].shared.context


def test_a_device_that_cannot_be_parted_is_used_whole_and_says_so(pocl: str, caplog: pytest.LogCaptureFixture) -> None:
    with override(opencl_subdevices=10_000):
        assert pocl in [f.device.name for f in find_devices()]
    assert f"{pocl} " in caplog.text and "cannot be parted into 10000" in caplog.text


def test_repeats_are_devices_of_their_own(pocl: str) -> None:
    with override(opencl_repeats=3):
        repeats = [f.device for f in find_devices() if f.device.name.startswith(pocl)]
    assert [d.name for d in repeats] == [f"{pocl}.{k}" for k in range(3)] and len({d.id for d in repeats}) == 3


def test_devices_of_the_same_name_have_ids_of_their_own(pocl: str) -> None:
    ids = asked(POCL_DEVICES="pthread pthread")["ids"]
    assert len(ids) == len(set(ids.values())) == len(find_devices()) + 1


@pytest.mark.parametrize(("platform", "kinds", "unified", "type"), [
    ("NVIDIA CUDA", "GPU", 0, DeviceType.GPU), ("Intel(R) OpenCL", "GPU", 1, DeviceType.IGPU), ("Oclgrind", "ALL", 0, DeviceType.TEST),
    ("Portable Computing Language", "CPU", 1, DeviceType.CPU), ("Xilinx", "ACCELERATOR", 0, DeviceType.ACCEL), ("Odd", "CUSTOM", 0, None)])
def test_types(platform: str, kinds: str, unified: int, type: DeviceType | None) -> None:
    cl = pytest.importorskip("pyopencl")
    made = SimpleNamespace(platform=SimpleNamespace(name=platform), type=getattr(cl.device_type, kinds), host_unified_memory=unified)
    assert device_type(made) is type


def test_pci_addresses_are_written_as_other_backends_write_them() -> None:
    nvidia = SimpleNamespace(extensions="cl_nv_device_attribute_query", pci_bus_id_nv=0x1B, pci_slot_id_nv=8, pci_domain_id_nv=0)
    amd = SimpleNamespace(extensions="cl_amd_device_attribute_query", topology_amd=SimpleNamespace(bus=-61, device=0, function=0))
    assert [pci_address(d) for d in (nvidia, amd, SimpleNamespace(extensions=""))] == ["0000:1b:01.0", "0000:c3:00.0", ""]


# -- what there is not ------------------------------------------------------------------------------------------


def test_without_a_platform_the_reason_says_what_to_install(tmp_path: Path) -> None:
    reason = asked(tmp_path)["reason"]
    assert "no OpenCL platform has a device" in reason and "pip install 'lanewise[pocl]'" in reason and "\n" not in reason


def test_a_driver_that_does_not_load_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not a library")
    for folder in (tmp_path, tmp_path / ".libs"):
        folder.mkdir(exist_ok=True)
        (folder / "broken.icd").write_text("/nowhere/libnothing.so\n")
        (folder / "other.icd").write_text(f"{tmp_path}/text.so\n")
    assert "pip install 'lanewise[pocl]'" in asked(tmp_path)["reason"]


def test_without_pyopencl_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(DeviceError, match="pip install pyopencl"):
        find_devices()
    registry = Registry(OPS.values(), found=[SimpleNamespace(name="opencl", load=lambda: OpenCLBackend)])
    assert registry.all == [] and "pip install pyopencl" in registry.unavailable[0].reason
    with pytest.raises(DeviceError, match="'opencl:0' is unavailable: pyopencl cannot be imported"):
        registry.get("opencl:0")


def test_a_platform_without_devices_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cl = pytest.importorskip("pyopencl")

    class Empty:
        name = "Empty"

        def get_devices(self) -> list[object]:
            raise cl.RuntimeError("clGetDeviceIDs failed: DEVICE_NOT_FOUND")

    monkeypatch.setattr(cl, "get_platforms", lambda: [Empty()])
    with pytest.raises(DeviceError, match="no OpenCL platform has a device"):
        find_devices()


# -- what drivers say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "type"), [("OUT_OF_RESOURCES", AllocationError), ("MEM_OBJECT_ALLOCATION_FAILURE", AllocationError),
                                              ("INVALID_KERNEL_ARGS", DeviceError), ("INVALID_WORK_GROUP_SIZE", DeviceError)])
def test_errors_of_the_driver_become_ours(status: str, type: type[Exception]) -> None:
    cl = pytest.importorskip("pyopencl")
    with pytest.raises(type, match=f"launching add for tensor 'y': .*opencl:0.*{status}.*device") as caught:
        with typed("opencl:0", "launching add for tensor 'y'"):
            raise module.library().RuntimeError(cl._cl._ErrorRecord(msg="", code=getattr(cl.status_code, status), routine="clEnqueue"))
    assert "\n" not in str(caught.value)
