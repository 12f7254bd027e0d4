"""Profiles, one seed for everything that is random, a kernel cache shared by all workers, and an account of golden tests."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

CACHE = "LANEWISE_CACHE_DIR"
GOLDEN = "golden"
PROFILES = {"ci": 10, "dev": 25, "nightly": 500}
for _name, _examples in PROFILES.items():
    settings.register_profile(_name, max_examples=_examples, deadline=None, print_blob=True,
                              suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])

collect_ignore = ["plugin_example"]  # a package of its own, with a test of its own: test_plugin_example.py runs it
OWN_CACHE = pytest.StashKey[Path]()


def profile() -> str:
    """The profile asked for, `ci` by default."""
    name = os.environ.get("LANEWISE_PROFILE", "ci")
    if name not in PROFILES:
        raise pytest.UsageError(f"LANEWISE_PROFILE={name}: {', '.join(PROFILES)} are known")
    return name


def seed_of_commit() -> int:
    """A number that changes with each commit, so that keys take turns and a failure repeats; any number outside a checkout."""
    try:
        head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return int(subprocess.run(head, capture_output=True, text=True, check=True, timeout=10).stdout[:8], 16)
    except (OSError, ValueError, subprocess.SubprocessError):
        return random.SystemRandom().randrange(2**32)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanewise")
    group.addoption("--lanewise-seed", type=int, default=None, help="repeat a run: examples and the choice of keys follow this number")
    group.addoption("--update-golden", action="store_true", help="write the kept texts of kernels again")
    group.addoption("--all-keys", action="store_true", help="test every key of every kernel table, not a subset that changes with the seed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before Hypothesis' own plugin looks at its seed. Parallel workers get seed and cache from the process that started them."""
    settings.load_profile(profile())
    options = config.option
    if "lanewise_seed" in getattr(config, "workerinput", {}):
        options.lanewise_seed = config.workerinput["lanewise_seed"]  # type: ignore[attr-defined]
    elif options.lanewise_seed is None:
        options.lanewise_seed = seed_of_commit()
    if getattr(options, "hypothesis_seed", None) is None:
        options.hypothesis_seed = str(options.lanewise_seed)
    options.all_keys = options.all_keys or profile() == "nightly"
    if CACHE not in os.environ:
        config.stash[OWN_CACHE] = Path(tempfile.mkdtemp(prefix="lanewise-tests-"))
        os.environ[CACHE] = str(config.stash[OWN_CACHE])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Runs where parallel workers are started."""
    node.workerinput["lanewise_seed"] = node.config.option.lanewise_seed


def pytest_unconfigure(config: pytest.Config) -> None:
    if (own := config.stash.get(OWN_CACHE, None)) is not None:
        os.environ.pop(CACHE, None)
        shutil.rmtree(own, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    keys = "all keys" if config.option.all_keys else "a subset of keys (--all-keys for all)"
    return f"lanewise: profile {profile()}, {keys}, --lanewise-seed {config.option.lanewise_seed}, kernels in {os.environ[CACHE]}"


@pytest.fixture(scope="session")
def run_seed(request: pytest.FixtureRequest) -> int:
    """The number everything random follows from."""
    return int(request.config.option.lanewise_seed)


@pytest.fixture(scope="session")
def cpu() -> Iterator[Any]:
    """The CPU backend with every op, on two threads; its compiled kernels serve the whole run."""
    from engine.backends.cpu import CpuBackend
    from kernels import OPS

    backend = CpuBackend(list(OPS.values()), threads=2)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden data; tests that need it are skipped, and counted, where there is none."""
    from engine.settings import settings as lanewise

    place = lanewise().golden
    if place is None:
        pytest.skip("LANEWISE_GOLDEN is not set: it names the folder of golden data")
    if not place.is_dir():
        pytest.skip(f"LANEWISE_GOLDEN={place} is no folder")
    return place


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Golden tests are those marked so, or that use the fixture."""
    report = yield
    if item.get_closest_marker(GOLDEN) or GOLDEN in getattr(item, "fixturenames", ()):
        report.user_properties.append((GOLDEN, True))  # type: ignore[attr-defined]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many golden tests there were, so that a run without the data cannot look like one with it."""
    counts: Counter[str] = Counter()
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if (GOLDEN, True) in getattr(report, "user_properties", ()):
                counts[outcome] += 1
    if counts:
        skipped = counts.pop("skipped", 0)
        ran = ", ".join(f"{n} {outcome}" for outcome, n in counts.items()) or "none"
        terminalreporter.write_line(f"lanewise: golden tests: {sum(counts.values())} ran ({ran}), {skipped} skipped")
