"""The layer table, read from the imports: who may import whom, what stays out of the core, and what `import engine` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "engine").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
KERNELS = "K"
LAYERS: dict[str, int | str] = {
    "engine.errors": 0, "engine.settings": 0, "engine.dtypes": 0, "engine.grids": 0, "engine.object_cache": 0,
    "engine.op": 1, "engine.pattern": 1, "engine.lang": 1, "engine.tensor": 1, "engine.graph": 1,
    "engine.backend": 2, "engine.layouts": 2, "engine.calls": 2, "engine.registry": 2,
    "engine.backends": 2, "engine.rewrite": 2, "engine.testing_backends": 2,
    "engine.sched": 3,
    "engine.models": 4, "engine.model": 4, "engine.generate": 4, "engine.tokenizer": 4, "engine.gguf": 4, "engine.sample": 4,
    "engine.cli": 5, "engine.runtime": 5, "engine.testing": 5, "engine.benchmark": 5, "engine.__main__": 5, "engine": 5,
    "kernels": KERNELS}
KERNELS_MAY_IMPORT = ("engine.op", "engine.lang.words", "engine.dtypes", "engine.grids", "engine.tensor", "kernels", "numpy", "math")
GPU_LIBRARIES = {"numba.cuda": "engine.backends.cuda", "cuda": "engine.backends.cuda", "pyopencl": "engine.backends.opencl",
                 "pycuda": "engine.backends.cuda", "cupy": "engine.backends.cuda"}
COMPILERS = ("numba", "llvmlite")  # belong to the CPU backend, and to the CUDA backend's own folder


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def layer_of(module: str) -> int | str:
    """The layer of the longest entry that holds the module."""
    return LAYERS[max((m for m in LAYERS if inside(module, m)), key=len)]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def imports(path: Path, *, at_run_time: bool = True) -> Iterator[tuple[str, int]]:
    """Full names of the modules a file imports, and the lines; those only for type checkers count unless `at_run_time`."""
    hidden = {id(n) for node in ast.walk(tree_of(path)) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
              for s in node.body for n in ast.walk(s)}
    for node in ast.walk(tree_of(path)):
        if at_run_time and id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for a in node.names:
                whole = f"{node.module}.{a.name}"
                yield (whole if is_module(whole) else str(node.module)), node.lineno


def wrong_imports(path: Path) -> Iterator[str]:
    me = name_of(path)
    mine = layer_of(me)
    for other, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}: {me} imports {other}"
        if not (inside(other, "engine") or inside(other, "kernels")):
            continue
        theirs = layer_of(other)
        if mine == KERNELS:
            continue  # held by its own test
        if theirs == KERNELS:
            if isinstance(mine, int) and mine < 4:
                yield f"{where}: only layers 4 and 5 know the kernels"
        elif isinstance(theirs, int) and isinstance(mine, int) and theirs > mine:
            yield f"{where}: layer {mine} imports layer {theirs}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_has_a_layer(path: Path) -> None:
    owner = max((m for m in LAYERS if inside(name_of(path), m)), key=len)
    assert owner != "engine" or name_of(path) == "engine", f"{name_of(path)} is in no layer: add it to the table"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    assert list(wrong_imports(path)) == []


def test_kernels_import_only_the_language() -> None:
    wrong = []
    for path in (ROOT / "kernels").glob("*.py"):
        for other, line in imports(path):
            collects = path.name == "__init__.py" and other in ("importlib", "pkgutil", "__future__")
            if not collects and not any(inside(other, m) for m in KERNELS_MAY_IMPORT):
                wrong.append(f"{path.name}:{line}: {other}")
    assert wrong == []


def test_a_backend_knows_no_sibling() -> None:
    wrong = []
    for path in (ROOT / "engine" / "backends").rglob("*.py"):
        own = ".".join(name_of(path).split(".")[:3])
        wrong += [f"{name_of(path)}:{line}: {other}" for other, line in imports(path)
                  if inside(other, "engine.backends") and other != "engine.backends" and not inside(other, own)]
    assert wrong == []


def test_only_the_runtime_joins_kernels_and_backends() -> None:
    for path in FILES:
        seen = {other for other, _ in imports(path)}
        joins = any(inside(o, "kernels") for o in seen) and any(inside(o, "engine.backends") for o in seen)
        assert not joins or name_of(path) == "engine.runtime", name_of(path)


def test_the_scheduler_knows_no_backend_by_name() -> None:
    for path in (ROOT / "engine" / "sched").glob("*.py"):
        assert not [o for o, _ in imports(path, at_run_time=False) if inside(o, "engine.backends") or inside(o, "kernels")], path


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_gpu_libraries_stay_in_their_backend(path: Path) -> None:
    for other, line in imports(path, at_run_time=False):
        for library, home in GPU_LIBRARIES.items():
            assert not inside(other, library) or inside(name_of(path), home), f"{path}:{line}: {other}"
        if any(inside(other, c) for c in COMPILERS):
            assert inside(name_of(path), "engine.backends.cpu") or inside(name_of(path), "engine.backends.cuda"), f"{path}:{line}: {other}"


def test_no_print_outside_the_command_line() -> None:
    wrong = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in FILES if not inside(name_of(path), "engine.cli")
             for node in ast.walk(tree_of(path))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert wrong == []


def test_only_the_settings_read_the_environment() -> None:
    wrong = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in FILES if name_of(path) != "engine.settings"
             for node in ast.walk(tree_of(path))
             if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"))
             or (isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in ("environ", "getenv") for a in node.names))]
    assert wrong == []


def test_the_core_never_imports_tests() -> None:
    for path in FILES:
        assert not [o for o, _ in imports(path, at_run_time=False) if inside(o, "tests") or inside(o, "bench")], path


def loaded_by(statement: str) -> tuple[set[str], str]:
    """Modules in memory after a statement in a new process, and what it wrote."""
    script = f"{statement}\nimport sys\nprint('---')\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    said, _, modules = done.stdout.rpartition("---\n")
    return set(modules.split()), said + done.stderr


@pytest.mark.parametrize("statement", ["import engine", "import engine, kernels", "from engine.backends.cpu import CpuBackend"])
def test_an_import_loads_no_compiler_and_no_gpu_library_and_says_nothing(statement: str) -> None:
    modules, said = loaded_by(statement)
    assert said == ""
    assert not {"numba", "pyopencl", "cuda", "cupy", "matplotlib", "tokenizers", "torch"} & modules
    assert "engine" in modules


def test_import_engine_is_light() -> None:
    modules, _ = loaded_by("import engine")
    assert not {"llvmlite", "numpy", "jinja2", "rich"} & modules
