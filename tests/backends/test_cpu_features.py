"""The CPU target: its width and special instructions follow the CPU and the settings."""

from __future__ import annotations

import sys

import pytest

from engine.backends.cpu.features import features, host_features
from engine.errors import SettingError
from engine.settings import override


@pytest.mark.parametrize(("names", "lanes"), [({"avx512f", "avx512bw", "avx512vl", "avx2"}, 16), ({"avx512f", "avx2"}, 8), ({"avx2"}, 8),
                                              ({"ssse3"}, 4), (set(), 4)])
def test_the_width_follows_the_cpu(monkeypatch: pytest.MonkeyPatch, names: set[str], lanes: int) -> None:
    monkeypatch.setattr(sys.modules[features.__module__], "host_features", lambda: frozenset(names))
    with override(lanes=0, portable=False, features=""):
        assert features().lanes == lanes
        assert features().names == names


def test_settings_narrow_it() -> None:
    with override(lanes=0, portable=False, features="avx2,ssse3"):
        assert features().names == host_features() & {"avx2", "ssse3"}
        assert features().lanes == (8 if "avx2" in host_features() else 4)
    with override(lanes=4, portable=True, features=""):
        assert features().lanes == 4
        assert not features().names


def test_an_unknown_instruction_set_is_an_error() -> None:
    with override(features="avx2,mmx9"), pytest.raises(SettingError, match="'mmx9'.*avx2.*are known"):
        features()
