# SPDX-License-Identifier: Apache-2.0
"""Values of wrong kinds, files made to hurt and outputs that cannot be written: typed errors."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.cli import main
from kvcore.errors import KVCoreError, ParamInvalidError
from kvcore.offload import (
    BlockPool,
    DevicePool,
    LayerEvents,
    OffloadManager,
    PrefillOffloader,
    SelectionCache,
)
from kvcore.replay import (
    ModelProfile,
    OffloadOptions,
    OffloadReplay,
    PagedCaches,
    Replay,
    TraceRequest,
    generate_trace,
    read_ids,
    read_trace,
    score_trace,
    write_ids,
)

ARRAY = np.arange(4)
TINY = ModelProfile.named("tiny-sparse")
REQUEST = TraceRequest(0, 0.0, 40, 9, (0,))


def device_pool(**options: Any) -> DevicePool:
    full = {0: [np.zeros((4, 4, 8), np.uint8)]}
    pool = DevicePool(full, **{"capacity": 8, "topk": 4, "max_tokens": 16, **options})
    pool.admit("r")
    return pool


def selection(**options: Any) -> SelectionCache:
    full = np.zeros((4, 8, 8), np.float16)
    cache = SelectionCache(full, batch=2, steps=1, topk=4, page=4, **options)
    cache.admit("r")
    return cache


CALLS: dict[str, Callable[[Any], object]] = {
    "match": lambda v: BlockPool(3).match(v),
    "acquire": lambda v: BlockPool(3).acquire(v),
    "release": lambda v: BlockPool(3).release(v),
    "pool policy": lambda v: device_pool(policy=v),
    "pool device": lambda v: device_pool(device=v),
    "pool evict": lambda v: device_pool().evict(v),
    "pool plan": lambda v: device_pool().plan(v, ARRAY, ARRAY),
    "abandon": lambda v: device_pool().abandon(v),
    "selection device": lambda v: selection(device=v),
    "place": lambda v: selection().place(v),
    "permute": lambda v: selection().permute(v),
    "manager policy": lambda v: OffloadManager(3, v),
    "manager events": lambda v: OffloadManager(3, events=v),
    "prepare_store": lambda v: OffloadManager(3).prepare_store(v),
    "lookup": lambda v: OffloadManager(3).lookup(v),
    "read_ids": read_ids,
    "write_ids": lambda v: write_ids(v, np.zeros((1, 1, 1), np.int32)),
    "score model": lambda v: score_trace(1, tokens=8, topk=2, model=v),
    "generate": lambda v: list(generate_trace(v)),
    "generate seed": lambda v: list(generate_trace(1, seed=v)),
    "trace": read_trace,
    "trace limit": lambda v: read_trace([], limit=v),
    "named": ModelProfile.named,
    "find": ModelProfile.find,
    "load": ModelProfile.load,
    "config": ModelProfile.from_config,
    "figures": lambda v: ModelProfile("x", v),
    "figure": lambda v: ModelProfile("x", {**TINY.figures, "layers": v}),
    "context": TINY.request_us,
    "drafts": lambda v: TINY.step_us(1, 1, v),
    "option device": lambda v: OffloadOptions(device=v).check(TINY),
    "option policy": lambda v: OffloadOptions(policy=v).check(TINY),
    "replay requests": lambda v: Replay(v, TINY.shape, num_blocks=4),
    "replay seed": lambda v: Replay([REQUEST], TINY.shape, num_blocks=4, seed=v),
    "offload requests": lambda v: OffloadReplay(v, TINY, OffloadOptions()),
    "offload model": lambda v: OffloadReplay([REQUEST], v, OffloadOptions()),
    "offload options": lambda v: OffloadReplay([REQUEST], TINY, v),
    "caches shape": lambda v: PagedCaches(v, 1, 1),
    "caches layout": lambda v: PagedCaches(TINY.shape, 1, 1, v),
}
TAKES_NONE = {
    "pool device", "selection device", "score model", "trace limit", "drafts", "option device",
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("value", [None, -1, 0.5, [[1]], np.zeros((2, 2)), ...], ids=repr)
def test_values_of_wrong_kinds(call: Callable[[Any], object], value: Any) -> None:
    name = next(name for name, found in CALLS.items() if found is call)
    if value is None and name in TAKES_NONE:
        call(value)
        return
    with pytest.raises(KVCoreError):
        call(value)


def test_streams_and_devices_of_wrong_kinds() -> None:
    with kvcore.Device("A3", clock="model") as device:
        full = {0: [device.empty_swapped((4, 4, 8), "uint8")]}
        stream = device.stream("d2h")
        for wrong in (None, 3, "s", device, ARRAY):
            events = LayerEvents(device, [0])
            for method in (events.layer_loaded, events.wait_for_layer_load, events.wait_for_save):
                with pytest.raises(ParamInvalidError, match="stream"):
                    method(*([wrong] if method == events.wait_for_save else [0, wrong]))
            with pytest.raises(ParamInvalidError, match="copies"):
                PrefillOffloader(device, full, max_tokens=4, copies=wrong)
        for lanes in (None, 3, [], ARRAY):
            with pytest.raises(ParamInvalidError, match=r"full\[0\]"):
                PrefillOffloader(device, {0: lanes}, max_tokens=4, copies=stream)
        with pytest.raises(ParamInvalidError, match="device"):
            LayerEvents(None, [0])  # type: ignore[arg-type]
        assert device.memory().used == 0


@pytest.mark.parametrize(
    "text", ["a = " + "1" * 5000, "a = " + "[" * 50_000, "[" + "a." * 20_000 + "b]"]
)
def test_toml_made_to_hurt(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(ParamInvalidError, match=r"expected a (TOML file|table)"):
        ModelProfile.load(tmp_path / "m.toml")


@pytest.mark.parametrize(
    "changed", [{"num_hidden_layers": 2**31 - 1}, {"indexer_types": ["full", "shared", [], "full"]}]
)
def test_config_made_to_hurt(tmp_path: Path, changed: dict[str, Any]) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "index_topk": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(ParamInvalidError, match=next(iter(changed))):
        ModelProfile.from_config(tmp_path / "config.json")


def test_ids_header_that_never_ends(tmp_path: Path) -> None:
    header = b"(" * 5000 + b"\n"
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(tmp_path / "i.npz", "w") as archive:
        archive.writestr("ids.npy", member)
    with pytest.raises(ParamInvalidError, match="npy form"):
        read_ids(tmp_path / "i.npz")


@pytest.mark.parametrize("path", ["a\0b.toml", "\ud800.toml"])
def test_paths_that_cannot_be(path: str) -> None:
    for read in (ModelProfile.load, ModelProfile.find, read_ids, read_trace):
        with pytest.raises(ParamInvalidError, match="path of a file"):
            read(path)


def test_arrivals_too_late_to_wait_for() -> None:
    late = [TraceRequest(0, 2.0**53, 40, 9, (0,))]
    for fidelity in ("full", "sampled"):
        with pytest.raises(ParamInvalidError, match="timestamp"):
            OffloadReplay(late, TINY, OffloadOptions(fidelity=fidelity, arrivals="time"))


@pytest.mark.parametrize("options", [["--policy", "lru"], []])
def test_a_folder_is_no_file_for_a_report(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "--requests", "1", "--json", str(tmp_path), *options]) == 2
    said = capsys.readouterr()
    assert "expected a file, got a folder" in said.err
    assert not said.out


def test_a_sweep_names_each_value_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--requests", "1", "--sweep", "pool=1024,1024"]) == 2
    assert "each value of an axis once" in capsys.readouterr().err
