# SPDX-License-Identifier: Apache-2.0
"""Making and entering devices: threads that the system refuses, and what holds by default."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import kvcore
from kvcore.runtime import default_race_check


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
@pytest.mark.parametrize("refused", [0, 2])
async def test_threads_that_the_system_refuses(
    clock: str, refused: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("kvcore-worker"):
            if len(started) == refused:
                raise error
            started.append(thread)
        start(thread)

    dev = kvcore.Device("A3", clock=clock, workers=4)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(kvcore.StreamError, match=rf"^workers: .* got {refused} of") as caught:
            await dev.__aenter__()
    assert caught.value.__cause__ is error
    assert len(started) == refused
    assert not any(thread.is_alive() for thread in started)
    for act in (dev.stream, lambda: dev.empty(3), dev.__enter__):
        with pytest.raises(kvcore.StreamError):
            act()
    assert dev.memory().used == 0


def test_an_interrupt_while_entering_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "kvcore-worker-1":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kvcore.Device(workers=3).__enter__()


def test_the_default_race_check() -> None:
    def modes() -> list[str]:
        return [kvcore.Device(**options).race_check for options in ({}, {"race_check": "off"})]

    assert modes() == ["off", "off"]
    with default_race_check("raise"):
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(modes()))
        thread.start()
        thread.join()
        assert found == modes() == ["raise", "off"]
        with default_race_check("record"):
            assert modes() == ["record", "off"]
    assert modes() == ["off", "off"]
    with (
        pytest.raises(kvcore.ParamInvalidError, match=r"^mode: expected one of off, record, raise"),
        default_race_check("on"),  # type: ignore[arg-type]
    ):
        pass
