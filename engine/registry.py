"""What this machine has: built-in and plug-in backends, their order, and why absent ones are absent."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Protocol

from engine.backend import Backend, DeviceType
from engine.errors import DeviceError
from engine.op import Op
from engine.settings import settings

log = logging.getLogger(__name__)

GROUP = "engine.backends"
FLOOR = "cpu"  # the backend that is always there, always last, and runs everything
_ORDER = {DeviceType.GPU: 0, DeviceType.IGPU: 1, DeviceType.META: 2, DeviceType.ACCEL: 3, DeviceType.CPU: 4, DeviceType.TEST: 6}
_BY_DEFAULT = (DeviceType.GPU, DeviceType.IGPU, DeviceType.ACCEL)


class EntryPoint(Protocol):
    """What is used of `importlib.metadata.EntryPoint`: a name, and a class behind it."""

    @property
    def name(self) -> str: ...

    def load(self) -> object: ...


@dataclass(frozen=True)
class Unavailable:
    """A backend that is known but cannot be used here, and why."""

    name: str
    reason: str


class Registry:
    """Every backend of this machine, found once. Those that cannot be used by default are looked for when one of them is asked for."""

    def __init__(self, ops: Iterable[Op], *, found: Iterable[EntryPoint] | None = None, plugins: Path | None = None) -> None:
        """Look round.

        Args:
            ops: what the backends are to run.
            found: entry points, those of the installed packages by default.
            plugins: a folder of plug-in modules, by default the one in the settings.
        """
        self._unavailable: list[Unavailable] = []
        self._ops = tuple(ops)
        candidates = [*self._load_entry_points(entry_points(group=GROUP) if found is None else found),
                      *self._load_plugins(plugins or settings().plugins)]
        self._found: list[Backend] = []
        self._later: list[tuple[str, type[Backend]]] = []
        for name, cls in self._best(candidates):
            if self._attempt(name, cls.may_be_default) is False:
                self._later.append((name, cls))
            else:
                self._found += self._discover(name, cls)

    # -- what there is ------------------------------------------------------------------------------------------

    @property
    def all(self) -> list[Backend]:
        """Best first; the CPU behind the others, TEST devices last."""
        while self._later:
            self._found += self._discover(*self._later.pop(0))
        return sorted(self._found, key=_rank)

    @property
    def backends(self) -> list[Backend]:
        """Those used when nothing is asked for: GPU and IGPU, ACCEL, then the CPU."""
        return list(_without_twins(b for b in sorted(self._found, key=_rank) if _is_default(b)))

    @property
    def unavailable(self) -> list[Unavailable]:
        """Those that failed to import, found no device or do not run on this machine. Nothing of that raises."""
        _ = self.all
        return self._unavailable

    # -- finding ------------------------------------------------------------------------------------------------

    def _load_entry_points(self, found: Iterable[EntryPoint]) -> Iterator[tuple[str, type[Backend]]]:
        for point in found:
            cls = self._attempt(point.name, point.load)
            if isinstance(cls, type) and issubclass(cls, Backend):
                yield getattr(cls, "name", point.name), cls
            elif cls is not None:
                self._absent(point.name, f"the entry point names {cls!r}, which is no Backend class")

    def _load_plugins(self, folder: Path | None) -> Iterator[tuple[str, type[Backend]]]:
        if folder is None:
            return
        if not folder.is_dir():
            self._absent(str(folder), "this plug-in folder does not exist")
            return
        for file in sorted(folder.glob("*.py")):
            if not _defines_backend(file):
                log.debug("%s defines no backend: skipped", file)
                continue
            module = self._attempt(file.stem, lambda file=file: _import_file(file))  # type: ignore[misc]
            if isinstance(module, ModuleType):
                for cls in vars(module).values():
                    if _is_own_backend(cls, module):
                        yield getattr(cls, "name", file.stem), cls

    def _best(self, candidates: Sequence[tuple[str, type[Backend]]]) -> Iterator[tuple[str, type[Backend]]]:
        """Per name the variant with the highest score; the first of equals."""
        variants: dict[str, list[tuple[int, type[Backend]]]] = {}
        for name, cls in candidates:
            score = self._attempt(name, cls.score)
            if isinstance(score, int):
                variants.setdefault(name, []).append((score, cls))
        for name, scored in variants.items():
            score, cls = max(scored, key=lambda pair: pair[0])
            if score > 0:
                log.debug("%s: %s with score %d of %d variants", name, cls.__qualname__, score, len(scored))
                yield name, cls
            else:
                self._absent(name, "not on this machine: every variant scores 0")

    def _discover(self, name: str, cls: type[Backend]) -> Sequence[Backend]:
        backends = self._attempt(name, lambda: cls.discover(self._ops))
        if backends is None:
            return ()
        assert isinstance(backends, list)
        if not backends:
            self._absent(name, "it found no device")
        return backends

    def _attempt(self, name: str, act: Callable[[], object]) -> object:
        """What `act` returns; whatever it raises becomes the reason why `name` is unavailable."""
        try:
            return act()
        except DeviceError as e:
            self._absent(name, str(e))
        except (Exception, SystemExit) as e:
            log.debug("backend %s failed", name, exc_info=True)
            self._absent(name, f"{type(e).__name__}: {e}".strip().splitlines()[0])
        return None

    def _absent(self, name: str, reason: str) -> None:
        self._unavailable.append(Unavailable(name, reason))

    # -- asking -------------------------------------------------------------------------------------------------

    @property
    def floor(self) -> Backend:
        """The CPU backend."""
        return self.get(FLOOR)

    def get(self, name: str) -> Backend:
        """The backend of this name, in either case.

        Raises:
            DeviceError: unknown (the known ones are listed), or unavailable (with the reason).
        """
        wanted = name.strip().lower()
        for b in self._one_by_one():
            if wanted in (b.name.lower(), b.device.name.lower()):
                return b
        for absent in self.unavailable:
            if absent.name.lower() == wanted.partition(":")[0]:  # "opencl:1" where there is no OpenCL at all
                raise DeviceError(f"device {name!r} is unavailable: {absent.reason}")
        known = ", ".join(b.name for b in self.all) or "none"
        raise DeviceError(f"no device {name!r}; there is {known} (and 'none' for the CPU alone)")

    def _one_by_one(self) -> Iterator[Backend]:
        """Those found already, then all."""
        yield from list(self._found)
        yield from self.all

    def select(self, names: Sequence[str] | str | None = None, *, strict: bool = False) -> list[Backend]:
        """The backends of these names in this order, each once, and behind them the CPU as the floor, unless `strict`.

        None selects the default list, "none" the CPU alone.

        Raises:
            DeviceError: a name that is unknown or unavailable.
        """
        if names is None:
            return list(self.backends)
        asked = [n.strip() for n in (names.split(",") if isinstance(names, str) else names) if n.strip()]
        if any(n.lower() == "none" for n in asked):
            if len(asked) > 1:
                raise DeviceError(f"'none' stands alone: {', '.join(asked)} asks for devices as well")
            return [self.floor]
        chosen = list(dict.fromkeys(self.get(n) for n in asked))
        if not chosen:
            raise DeviceError("no device is named: give names, or 'none' for the CPU alone")
        return chosen if strict or self.floor in chosen else [*chosen, self.floor]

    def close(self) -> None:
        """Close every backend that was found."""
        for b in self._found:
            b.close()


def _rank(b: Backend) -> int:
    """Place in the order; the sort is stable, so equals stay as they were found."""
    return _ORDER[b.device.type] + _is_floor(b)


def _is_floor(b: Backend) -> bool:
    return b.name == FLOOR


def _is_default(b: Backend) -> bool:
    """CPU devices other than the floor (OpenCL's), META and TEST devices are used only when named."""
    return _is_floor(b) or b.device.type in _BY_DEFAULT


def _without_twins(backends: Iterable[Backend]) -> Iterator[Backend]:
    """Hardware that two backends offer is used once, by the first."""
    seen: dict[str, Backend] = {}
    for b in backends:
        first = seen.setdefault(b.device.id, b)
        if first is b:
            yield b
        else:
            log.info("%s is the same device as %s (%s): it is used only when named", b.name, first.name, b.device.id)


def _defines_backend(file: Path) -> bool:
    """Whether a file holds a class derived from something called ...Backend; told from its text, so that foreign files never run."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(ast.unparse(base).endswith("Backend") for node in tree.body if isinstance(node, ast.ClassDef) for base in node.bases)


def _import_file(file: Path) -> ModuleType:
    name = f"lanewise_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_own_backend(thing: object, module: ModuleType) -> bool:
    return (isinstance(thing, type) and issubclass(thing, Backend) and thing.__module__ == module.__name__
            and not inspect.isabstract(thing))
