# SPDX-License-Identifier: Apache-2.0
"""Every test here runs on both event loops and leaves no thread behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["wall", "model"])
def clock(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [t for t in threading.enumerate() if t.name.startswith("kvcore-worker")]
    assert not left
