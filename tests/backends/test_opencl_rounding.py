"""Division and square root where a device's own are only within 2.5 and 3 ulp: ours are the nearest float all the same."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from engine.backends.opencl.devices import find_devices, library
from engine.backends.opencl.prelude import pieces
from engine.errors import DeviceError

N = 200_000
# What a device may give: the nearest float, moved by up to two units in the last place.
SLOPPY = "float moved(float v, int by)\n{\n    return isfinite(v) && v != 0.0f ? as_float(as_int(v) + by) : v;\n}\n\n"
KERNEL = """
__kernel void both(__global const float *x, __global const float *y, __global const int *by, __global float *q, __global float *s)
{
    const int i = get_global_id(0);
    q[i] = divide(x[i], y[i], by[i]);
    s[i] = root(fabs(x[i]), by[i]);
}
"""


@pytest.fixture(scope="module")
def device() -> Any:
    try:
        return find_devices()[0]
    except DeviceError as why:
        pytest.skip(str(why))


def sloppy(name: str) -> str:
    """A function of the prelude on a device with sloppy division and roots."""
    text = pieces()[name].replace(") \n", ")\n")
    text = re.sub(r"^(float \w+\([^)]*)\)", r"\1, int by)", text)
    text = re.sub(r"= ([^;=]* / \w+);", r"= moved(\1, by);", text)
    text = re.sub(r"0\.5f / s", "moved(0.5f / s, by)", text)
    return text.replace("= sqrt(x);", "= moved(sqrt(x), by);")


def test_quotients_and_roots_are_the_nearest_floats(device: Any) -> None:
    rng = np.random.default_rng(5)
    x, y = ((rng.standard_normal(N) * 10.0 ** rng.integers(-12, 12, N)).astype(np.float32) for _ in range(2))
    by = rng.integers(-2, 3, N).astype(np.int32)
    text = SLOPPY + sloppy("divide") + "\n\n" + sloppy("root") + "\n" + KERNEL
    assert text.count("moved(") >= 5
    cl, context = library(), device.shared.context
    options = ["-cl-std=CL1.2", "-cl-fp32-correctly-rounded-divide-sqrt"]
    program = cl.Program(context, "#pragma OPENCL FP_CONTRACT OFF\n" + text).build(options)
    queue = cl.CommandQueue(context)
    flags = cl.mem_flags
    operands = [cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=a) for a in (x, y, by)]
    results = [cl.Buffer(context, flags.WRITE_ONLY, 4 * N) for _ in range(2)]
    cl.Kernel(program, "both")(queue, (N,), None, *operands, *results)
    quotients, roots = np.empty(N, np.float32), np.empty(N, np.float32)
    for host, there in zip((quotients, roots), results, strict=True):
        cl.enqueue_copy(queue, host, there)
    with np.errstate(all="ignore"):
        want = x / y
    normal = np.abs(want) > 1e-30
    assert (quotients == want)[normal].all(), np.flatnonzero((quotients != want) & normal)[:5]
    assert (roots == np.sqrt(np.abs(x))).all()
