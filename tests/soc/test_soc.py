# SPDX-License-Identifier: Apache-2.0
"""SoC names, profiles and how a call finds the one it is checked against."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import threading
from typing import Any

import anyio
import numpy as np
import pytest

import kvcore
from kvcore import soc as socs
from kvcore.errors import ParamInvalidError
from kvcore.soc import printing

NAMES = ("A2", "A3", "950")


def float32_call(**keywords: Any) -> None:
    """A call that every machine but the 950 refuses for its dtype."""
    kvcore.scatter_pa_kv_cache(
        np.zeros((2, 1, 8), np.float32),
        np.zeros((1, 4, 1, 8), np.float32),
        np.array([0, 1]),
        np.zeros((2, 1, 8), np.float32),
        np.zeros((1, 4, 1, 8), np.float32),
        **keywords,
    )


def refusing_soc(**keywords: Any) -> str | None:
    """Which SoC refuses the float32 call just now."""
    try:
        float32_call(**keywords)
    except ParamInvalidError as error:
        return re.findall(r" on (A2|A3|950) ", str(error))[0]
    return None


# ---------------------------------------------------------------- names and profiles
@pytest.mark.parametrize("name", NAMES)
def test_a_soc_is_made_by_name(name: str) -> None:
    one = kvcore.SoC(name)
    assert one == kvcore.SoC(name) == socs.PROFILES[name]
    assert len({one, kvcore.SoC(name)}) == 1
    assert one.name == name
    assert repr(one) == f"SoC({name!r})"
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one


def test_socs_differ() -> None:
    assert len({kvcore.SoC(name) for name in NAMES}) == 3


@pytest.mark.parametrize("name", ["A4", "", "a2", "910B", None, 950, b"A2", ["A2"], object()])
def test_an_unknown_name_is_refused_and_the_known_are_listed(name: Any) -> None:
    with pytest.raises(ParamInvalidError, match=r"^name: expected one of 'A2', 'A3', '950', got "):
        kvcore.SoC(name)


@pytest.mark.parametrize("soc", ["A4", "", "a2", 950, b"A2", ["A2"], object(), True, 0])
def test_an_unknown_soc_argument_is_refused(soc: Any) -> None:
    with pytest.raises(
        ParamInvalidError, match=r"^soc: expected one of 'A2', 'A3', '950' or None, got "
    ) as caught:
        float32_call(soc=soc)
    assert caught.value.argument == "soc"
    assert caught.value.code == 161002


@pytest.mark.parametrize("name", NAMES)
def test_a_name_and_its_soc_mean_the_same(name: str) -> None:
    wanted = None if name == "950" else name
    assert refusing_soc(soc=name) == wanted
    assert refusing_soc(soc=kvcore.SoC(name)) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_printing_a_soc_prints_its_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    print(kvcore.SoC(name))
    text = capsys.readouterr().out
    profile = kvcore.SoC(name).profile
    lines = text.splitlines()
    assert lines[0].startswith(f"{name}: {profile.product}, NpuArch {profile.arch}, ")
    for row in profile.scatter.key_value:
        assert any(re.match(rf"  {row.scenario} +", line) for line in lines), row
    assert f"block_size <= {profile.scatter.nz_block_size}" in text
    for _, quirk in printing.quirks(profile):
        assert quirk in text
    for source in profile.sources:
        assert source in text
    assert "\x1b" not in text  # plain text: it may be piped into a file


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_every_operator(name: str) -> None:
    lines = str(kvcore.SoC(name)).splitlines()
    for operator in (
        "ScatterPaKvCache",
        "ScatterPaCache",
        "KVCacheOperation",
        "GatherPaKvCache",
        "GatherSelectionKvCache",
    ):
        assert len([line for line in lines if line.startswith(f"{operator}:")]) == 1


def test_inside_a_sentence_a_soc_is_its_name() -> None:
    assert f"on {kvcore.SoC('A3')}, {kvcore.SoC('950'):>4}" == "on A3,  950"


def test_the_table_says_what_is_not_supported() -> None:
    assert "ScatterPaCache: not supported" in str(kvcore.SoC("A3"))
    assert "KVCacheOperation: not supported" in str(kvcore.SoC("950"))
    assert "key only: not in this operator" in str(kvcore.SoC("950"))
    assert "key only: scenario 6" in str(kvcore.SoC("A2"))


def test_a2_and_a3_accept_the_same() -> None:
    a2, a3 = kvcore.SoC("A2").profile, kvcore.SoC("A3").profile
    differing = {
        field for field in a2.__dataclass_fields__ if getattr(a2, field) != getattr(a3, field)
    }
    # The document of the selection names the A3 alone.
    assert differing == {"product", "names", "pattern", "selection"}
    assert a2.selection is not None
    assert dataclasses.replace(a2.selection, documented=True) == a3.selection


@pytest.mark.parametrize("name", NAMES)
def test_every_known_product_name_leads_to_its_soc(name: str) -> None:
    products = kvcore.SoC(name).profile.names
    assert len(set(products)) == len(products) > 5
    for product in products:
        assert socs.from_product(product) == kvcore.SoC(name)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("Ascend910B", None),  # bare: the first 910, an older machine
        ("Ascend910A", None),
        ("Ascend910ProB", None),
        ("Ascend910B4-1", "A2"),
        ("Ascend910_9399", "A3"),
        ("Ascend910_9589", "950"),  # before its release
        ("Ascend950DT_95ZZ", "950"),
        ("Ascend310P3", None),
        ("Ascend310B1", None),
        ("Ascend350_354f", None),
        ("", None),
    ],
)
def test_product_names_that_mislead(product: str, name: str | None) -> None:
    found = socs.from_product(product)
    assert (found.name if found else None) == name


# ---------------------------------------------------------------- where the SoC comes from
def test_without_a_soc_nothing_is_refused() -> None:
    assert refusing_soc() is None


@pytest.mark.parametrize(
    "name",
    [
        *("310P", "Ascend310P3", "310B", "Ascend310B1", "310", "910", "Ascend910A", "Ascend910B"),
        *("Ascend910ProA", "350", "Ascend350", "Ascend350_354f", "Atlas 350", "ascend310p"),
    ],
)
def test_products_without_a_profile_are_no_misspellings(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls = (
        lambda: kvcore.SoC(name),
        lambda: float32_call(soc=name),
        lambda: kvcore.use_soc(name).__enter__(),
    )
    for call in calls:
        with pytest.raises(
            ParamInvalidError, match="the operators are not supported there"
        ) as found:
            call()
        assert f"got {name!r} (" in str(found.value)
    monkeypatch.setenv("KVCORE_SOC", name)
    with pytest.raises(ParamInvalidError, match=r"^KVCORE_SOC: .*not supported there"):
        float32_call()
    assert socs.from_product(name) is None


@pytest.mark.parametrize("name", ["A4", "310X", "9100", "910B", "Ascend", "3500", "310P33", "A2 "])
def test_other_names_are_misspellings(name: str) -> None:
    with pytest.raises(ParamInvalidError, match=r"^soc: expected one of .* got ") as found:
        float32_call(soc=name)
    assert "not supported there" not in str(found.value)


def test_the_environment_is_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_SOC", "A2")
    assert refusing_soc() == "A2"
    monkeypatch.setenv("KVCORE_SOC", " A3 ")
    assert refusing_soc() == "A3"
    monkeypatch.setenv("KVCORE_SOC", "")
    assert refusing_soc() is None
    monkeypatch.delenv("KVCORE_SOC")
    assert refusing_soc() is None


def test_an_unknown_name_in_the_environment_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCORE_SOC", "A4")
    with pytest.raises(
        ParamInvalidError, match=r"^KVCORE_SOC: expected one of 'A2', 'A3', '950'.*, got 'A4'$"
    ) as caught:
        float32_call()
    assert caught.value.argument == "KVCORE_SOC"
    assert refusing_soc(soc="A3") == "A3"  # an argument needs no environment


def test_use_soc_beats_the_environment_and_an_argument_beats_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCORE_SOC", "A2")
    with kvcore.use_soc("A3") as inside:
        assert inside == kvcore.SoC("A3")
        assert refusing_soc() == "A3"
        assert refusing_soc(soc="950") is None
        with kvcore.use_soc(kvcore.SoC("950")):
            assert refusing_soc() is None
        assert refusing_soc() == "A3"
    assert refusing_soc() == "A2"


def test_use_soc_ends_when_the_block_fails() -> None:
    with pytest.raises(KeyError), kvcore.use_soc("A2"):
        raise KeyError
    assert refusing_soc() is None


@pytest.mark.parametrize("soc", ["A4", 950, object()])
def test_use_soc_refuses_unknown_names(soc: Any) -> None:
    with pytest.raises(ParamInvalidError, match=r"^soc: expected one of 'A2', 'A3', '950' or None"):
        kvcore.use_soc(soc).__enter__()
    assert socs.current() is None


async def test_two_tasks_see_their_own_soc() -> None:
    seen: dict[str, str | None] = {}
    entered = {"A2": anyio.Event(), "A3": anyio.Event()}

    async def task(name: str, other: str) -> None:
        with kvcore.use_soc(name):
            entered[name].set()
            await entered[other].wait()  # both are inside their blocks now
            seen[name] = refusing_soc()

    async with anyio.create_task_group() as group:
        group.start_soon(task, "A2", "A3")
        group.start_soon(task, "A3", "A2")
        await entered["A2"].wait()
        await entered["A3"].wait()
        seen["parent"] = refusing_soc()
    assert seen == {"A2": "A2", "A3": "A3", "parent": None}
    assert refusing_soc() is None


async def test_a_task_starts_with_its_parents_soc() -> None:
    seen: list[str | None] = []

    async def task() -> None:
        seen.append(refusing_soc())

    with kvcore.use_soc("A3"):
        async with anyio.create_task_group() as group:
            group.start_soon(task)
        seen.append(await anyio.to_thread.run_sync(refusing_soc))
    assert seen == ["A3", "A3"]


def test_a_thread_of_its_own_starts_without_one() -> None:
    seen: list[str | None] = []
    with kvcore.use_soc("A3"):
        thread = threading.Thread(target=lambda: seen.append(refusing_soc()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_plan_keeps_the_soc_it_was_made_with() -> None:
    arrays = [np.zeros((2, 1, 16), np.float16), np.zeros((1, 4, 1, 16), np.float16)]
    with kvcore.use_soc("A3"):
        plan = kvcore.plan_scatter_pa_kv_cache(*arrays, np.array([0, 1]))
    assert plan.soc == kvcore.SoC("A3")
    plan.run()
    assert kvcore.plan_scatter_pa_kv_cache(*arrays, np.array([0, 1])).soc is None
