"""Settings: every LANEWISE_* variable is typed and checked, defaults are the documented ones, tests may override them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from engine import settings as module
from engine.errors import SettingError
from engine.settings import Settings, override, settings


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is set, and nothing has been read yet."""
    for f in fields(Settings):
        monkeypatch.delenv(f"LANEWISE_{f.name.upper()}", raising=False)
    monkeypatch.setattr(module, "_current", None)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    s = settings()
    assert (s.cache_limit_mb, s.threads, s.lanes, s.portable, s.plugins, s.golden) == (1024, 0, 0, False, None, None)
    assert s.cache_dir == Path.home() / ".cache" / "lanewise"


def test_the_cache_follows_the_desktop_s_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert settings().cache_dir == Path("/somewhere/lanewise")


def test_our_own_folder_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("LANEWISE_CACHE_DIR", "/here")
    assert settings().cache_dir == Path("/here")


@pytest.mark.parametrize(("name", "text", "value"), [
    ("threads", "3", 3), ("threads", "1024", 1024), ("lanes", "4", 4), ("lanes", "16", 16), ("cache_limit_mb", "5", 5),
    ("portable", "1", True), ("portable", "True", True), ("portable", "yes", True), ("portable", "0", False), ("portable", "no", False),
    ("portable", "", False), ("features", "avx2,fma", "avx2,fma"), ("plugins", "/p", Path("/p")), ("golden", "g", Path("g"))])
def test_values_are_typed(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(f"LANEWISE_{name.upper()}", text)
    assert getattr(settings(), name) == value
    assert type(getattr(settings(), name)) is type(value)


@pytest.mark.parametrize(("name", "text", "why"), [
    ("threads", "many", "not an integer"), ("threads", "1.5", "not an integer"), ("threads", "-1", "negative"),
    ("threads", "1025", "1 to 1,024"), ("lanes", "5", "4, 8 or 16"), ("lanes", "32", "4, 8 or 16"), ("lanes", "", "not an integer"),
    ("cache_limit_mb", "-2", "negative"), ("portable", "maybe", "use 0 or 1")])
def test_values_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str, why: str) -> None:
    monkeypatch.setenv(f"LANEWISE_{name.upper()}", text)
    with pytest.raises(SettingError, match=why) as caught:
        settings()
    assert f"LANEWISE_{name.upper()}={text}" in str(caught.value).replace("'", "")


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = settings()
    monkeypatch.setenv("LANEWISE_THREADS", "9")
    assert settings() is first


def test_override_ends_with_its_block_even_after_an_error() -> None:
    before = settings()
    with override(threads=2, portable=True) as s:
        assert settings() is s and (s.threads, s.portable) == (2, True) and s.lanes == before.lanes
        with override(threads=3):
            assert (settings().threads, settings().portable) == (3, True)
        assert settings().threads == 2
    with pytest.raises(RuntimeError), override(threads=4):
        raise RuntimeError
    assert settings() is before


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(TypeError), override(colour="red"):
        pass


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        settings().threads = 3  # type: ignore[misc]


def test_every_setting_is_explained() -> None:
    assert Settings.__doc__ is not None
    for f in fields(Settings):
        assert f"        {f.name}: " in Settings.__doc__
