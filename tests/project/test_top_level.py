# SPDX-License-Identifier: Apache-2.0
"""The names of ``import kvcore``, as editors, checkers of types and running programs see them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import kvcore
from kvcore.runtime import Device

LAZY = ("Buffer", "Device", "DeviceProfile", "Event", "Graph", "Stream", "current_stream")
MODULES = ("benchmarks", "hifloat8", "offload", "replay", "runtime", "testing", "torch")


def test_dir_has_what_is_imported_on_first_use() -> None:
    program = (
        "import sys, kvcore; names = dir(kvcore); "
        "assert 'anyio' not in sys.modules and 'torch' not in sys.modules; print(*names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {*LAZY, *MODULES, *kvcore.__all__} <= set(done.stdout.split())


@pytest.mark.parametrize("name", [*LAZY, *MODULES])
def test_each_name_is_found(name: str) -> None:
    if name == "torch":
        pytest.importorskip("torch")
    assert getattr(kvcore, name) is getattr(kvcore, name)


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="module 'kvcore' has no attribute 'Devise'"):
        _ = kvcore.Devise  # type: ignore[attr-defined]


def test_a_device_shows_its_arguments() -> None:
    wanted = [p for name, p in inspect.signature(Device.__init__).parameters.items()][1:]
    assert list(inspect.signature(Device).parameters.values()) == wanted
    assert list(inspect.signature(kvcore.Device).parameters) == [p.name for p in wanted]
