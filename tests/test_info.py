# SPDX-License-Identifier: Apache-2.0
"""kvcore.info()."""

from __future__ import annotations

import json
from importlib.metadata import version

import numpy as np
import pytest

import kvcore
from kvcore import dtypes, threads


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVCORE_SOC", "KVCORE_NUM_THREADS", "KVCORE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    kvcore.set_num_threads(None)


def test_what_it_says() -> None:
    said = kvcore.info()
    assert said["version"] == kvcore.__version__ == version("kvcore")
    assert said["packages"]["numpy"] == np.__version__
    assert said["packages"]["ml_dtypes"] == version("ml_dtypes")
    assert said["cpu"]["usable_cores"] == threads.usable_cores()
    assert said["cpu"]["instruction_set"] in said["cpu"]["instruction_sets"]
    assert said["soc"] is None
    assert said["threads"]["num_threads"] == "automatic"
    assert said["backends"]["cpu"] is None
    assert list(said["dtypes"]) == [row.name for row in dtypes.DATA_DTYPES]
    assert said["dtypes"]["float16"] == "numpy"
    assert "ml_dtypes" in said["dtypes"]["bfloat16"]
    assert "pack_float4" in said["dtypes"]["float4_e2m1"]
    assert said["emulator"]["socs"] == ["A2", "A3", "950"]
    assert said["emulator"]["torch"] == said["packages"]["torch"]


def test_it_is_plain_data() -> None:
    assert json.loads(json.dumps(kvcore.info())) == kvcore.info()


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_SOC", "A3")
    monkeypatch.setenv("KVCORE_NUM_THREADS", "3")
    assert kvcore.info()["soc"] == "A3"
    assert kvcore.info()["threads"]["num_threads"] == 3
    with kvcore.use_soc("950"):
        assert kvcore.info()["soc"] == "950"
    kvcore.set_num_threads(2)
    assert kvcore.info()["threads"]["num_threads"] == 2
    kvcore.set_num_threads(None)


def test_settings_that_are_nonsense_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_SOC", "A9")
    monkeypatch.setenv("KVCORE_NUM_THREADS", "many")
    said = kvcore.info()
    assert said["soc"] == "KVCORE_SOC: expected one of 'A2', 'A3', '950' or None, got 'A9'"
    assert "KVCORE_NUM_THREADS: expected an int" in said["threads"]["num_threads"]
