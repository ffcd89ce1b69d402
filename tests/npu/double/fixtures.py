# SPDX-License-Identifier: Apache-2.0
"""The test double of CANN as fixtures of pytest, compiled once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from double import build
from double.direct import Double


@pytest.fixture(scope="session")
def cann_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where doubles are compiled; skips with the reason where they cannot be."""
    reason = build.why_not()
    if reason:
        pytest.skip(reason)
    return tmp_path_factory.mktemp("cann")


@pytest.fixture(scope="session")
def cann(cann_folder: Path) -> build.Installation:
    """A whole CANN for an A3, umbrella and split libraries, with the custom operator."""
    return build.build(cann_folder)


@pytest.fixture(scope="session")
def loaded_double(cann: build.Installation) -> Double:
    return Double(cann)


@pytest.fixture
def double(
    loaded_double: Double, cann: build.Installation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Double]:
    """The double as if just loaded: initialised, device 0 set, all rules kept at the end.

    A test that breaks a rule on purpose takes the violations it expects.
    """
    for name, value in cann.environment().items():
        monkeypatch.setenv(name, value)
    loaded_double.reset()
    loaded_double.start()
    yield loaded_double
    left = loaded_double.violations()
    loaded_double.reset()
    assert not left
