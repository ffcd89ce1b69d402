# SPDX-License-Identifier: Apache-2.0
"""Tiers as they are written, and what of them is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli.program import main
from kvcore.errors import ParamInvalidError
from kvcore.replay import ModelProfile, OffloadOptions, OffloadReplay, TraceRequest
from kvcore.replay.tiers.spec import TierSpec, parse_policies, parse_tiers

REQUESTS = [TraceRequest(0, 0.0, 300, 4, (0,)), TraceRequest(1, 0.0, 300, 4, (0,))]
QWEN = ModelProfile.named("qwen3-14b")
#: Bytes of a block of 128 tokens.
BLOCK = 163_840 * 128


def test_units_and_extras() -> None:
    tiers = parse_tiers(" hbm=40GiB, ssd=2TB@6GB/s:write=3GB/s:latency=100us ,dram=0.5TiB@800MiB/s")
    assert tiers == (
        TierSpec("hbm", 40 * 2**30),
        TierSpec("dram", 2**39, 800 * 2**20 / 1e6, 800 * 2**20 / 1e6),
        TierSpec("ssd", 2 * 10**12, 6e3, 3e3, 100.0),
    )
    assert parse_tiers("hbm=1B:prefix=off")[0].keeps is False
    assert parse_tiers("hbm=1KB:prefix=on,dram=1PB,remote=1GB@1B/s:latency=2ms")[1:] == (
        TierSpec("dram", 10**15),
        TierSpec("remote", 10**9, 1e-6, 1e-6, 2e3),
    )


def test_policies_of_all_tiers_or_of_each() -> None:
    names = {"hbm": 0, "dram": 0, "ssd": 0}
    assert set(parse_policies("arc", names).values()) == {"arc"}
    assert parse_policies("dram=lfu, ssd=fifo", names) == {
        "hbm": "lru", "dram": "lfu", "ssd": "fifo",
    }  # fmt: skip
    tiers = parse_tiers("hbm=1GB,dram=1GB", "hbm=length")
    assert [tier.policy for tier in tiers] == ["length", "lru"]


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("", "tiers: expected tiers like hbm=40GiB.*of hbm, dram, ssd, remote, got ''"),
        ("hbm", "tiers: expected tiers like .*got 'hbm'"),
        ("hbm=1GB,tape=1TB@1GB/s", "tiers: expected tiers like .*got 'tape=1TB@1GB/s'"),
        ("hbm=1GB,", "tiers: expected tiers like .*got ''"),
        ("HBM=1GB", "tiers: expected tiers like .*got 'HBM=1GB'"),
        ("hbm=1GB,hbm=2GB", "tiers: expected hbm once, got twice"),
        ("dram=1GB@1GB/s", "tiers: expected hbm among them.*got dram"),
        ("hbm=0GiB", "tiers: expected a size of hbm from 1B.*got '0GiB'"),
        ("hbm=0.5B", "tiers: expected a size of hbm"),
        ("hbm=40", "tiers: expected a size of hbm.*got '40'"),
        ("hbm=-4GiB", "tiers: expected a size of hbm.*got '-4GiB'"),
        ("hbm=4Gb", "tiers: expected a size of hbm.*got '4Gb'"),
        ("hbm=4gib", "tiers: expected a size of hbm.*got '4gib'"),
        ("hbm=infGiB", "tiers: expected a size of hbm.*got 'infGiB'"),
        ("hbm=nanGiB", "tiers: expected a size of hbm"),
        ("hbm=1e300GiB", "tiers: expected a size of hbm"),
        ("hbm=" + "9" * 400 + "GiB", "tiers: expected a size of hbm"),
        ("hbm=\u0664GiB", "tiers: expected a size of hbm"),
        ("hbm=99999999PiB", "tiers: expected a size of hbm from 1B to 1024PiB"),
        ("hbm=1GB@2TB/s", "tiers: expected hbm without a bandwidth"),
        ("hbm=1GB,dram=1GB@0GB/s", "tiers: expected a bandwidth of dram above 0.*'0GB/s'"),
        ("hbm=1GB,dram=1GB@5GB", "tiers: expected a bandwidth of dram.*'5GB'"),
        ("hbm=1GB,dram=1GB@5", "tiers: expected a bandwidth of dram.*'5'"),
        ("hbm=1GB,dram=1GB@40Gb/s", "tiers: expected a bandwidth of dram"),
        ("hbm=1GB,dram=1GB@", "tiers: expected a bandwidth of dram"),
        ("hbm=1GB,ssd=1GB,remote=1GB", r"tiers: expected a bandwidth \(@6GB/s\) of ssd, remote"),
        ("hbm=1GB,ssd=1GB:write=1GB/s", "tiers: expected a bandwidth .* of ssd beside"),
        ("hbm=1GB:write=1GB/s", "tiers: expected hbm with prefix, each once"),
        ("hbm=1GB:prefix=no", "tiers: expected hbm with prefix=on or prefix=off, got 'no'"),
        ("hbm=1GB,dram=1GB@1GB/s:latency=5", "tiers: expected a latency of dram.*'5'"),
        ("hbm=1GB,dram=1GB@1GB/s:latency=1s:latency=1s", "tiers: expected dram with write and"),
        ("hbm=1GB,dram=1GB@1GB/s:speed=1s", "tiers: expected dram with write and latency"),
    ],
)  # fmt: skip
def test_tiers_that_cannot_be(tiers: str, message: str) -> None:
    with pytest.raises(ParamInvalidError, match=message):
        parse_tiers(tiers)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("mru", "tier_policy: expected one of lru, lfu, length, arc, fifo, got 'mru'"),
        ("", "tier_policy: expected one of lru"),
        ("dram=best", "tier_policy: expected one of lru.*got 'best'"),
        ("ssd=lru", "tier_policy: expected tiers of hbm, dram, each once.*got 'ssd=lru'"),
        ("dram=lru,dram=lru", "tier_policy: expected tiers of hbm, dram, each once"),
        ("dram=lru,", "tier_policy: expected tiers of hbm, dram, each once"),
    ],
)
def test_policies_that_cannot_be(policy: str, message: str) -> None:
    with pytest.raises(ParamInvalidError, match=message):
        parse_tiers("hbm=1GB,dram=1GB", policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": 7}, "tiers: expected a text, got 7"),
        ({"tier_policy": None}, "tier_policy: expected a text, got None"),
        ({"tier_policy": "arc", "tiers": None}, "tier_policy: expected tiers .* got none"),
        ({"node_dies": 2, "tiers": None}, "node_dies: expected tiers .* got none"),
        ({"node_dies": 0}, "node_dies: expected an integer from 1"),
        ({"node_dies": True}, "node_dies: expected an integer from 1"),
        ({"policy": "lru"}, "policy: expected none together with tiers"),
        ({"pool": 4096}, "pool: expected none: without offload there is no pool"),
        ({"tiers": "hbm=65GiB"}, "tiers: expected hbm of at most 64.0 GiB: 64 GiB of A3, got 65"),
        ({"weights_gib": 30}, "tiers: expected hbm of at most 34.0 GiB: 64 GiB of A3 beside 30"),
        ({"tiers": f"hbm={BLOCK - 1}B"}, "tiers: expected hbm of at least a block of 20,971,520"),
        ({"tiers": f"hbm=1GiB,dram={2 * BLOCK - 1}B", "node_dies": 2},
         "tiers: expected dram of at least a block of 20,971,520 bytes for each of 2 dies"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    given = {"policy": "none", "tiers": "hbm=35GiB,dram=1GiB", **options}
    with pytest.raises(ParamInvalidError, match=message):
        OffloadReplay(REQUESTS, QWEN, OffloadOptions(**given))


def test_the_least_that_can_be() -> None:
    """A block of a tier, device memory to the last byte, a share of a block for each die."""
    for options in (
        {"tiers": "hbm=64GiB"},
        {"tiers": "hbm=34GiB", "weights_gib": 30},
        {"tiers": f"hbm=1GiB,dram={2 * BLOCK}B", "node_dies": 2},
    ):
        report = OffloadReplay(REQUESTS, QWEN, OffloadOptions(policy="none", **options)).run()
        assert report.finished_requests == 2


def test_missing_figures_are_named_at_once(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
    config.write_text(json.dumps(shape))
    model = ModelProfile.from_config(config)
    options = {"policy": "none", "tiers": "hbm=1GiB"}
    everything = (
        "step_fixed, step_request, step_attended, step_indexed, prefill_token, prefill_attended"
    )
    with pytest.raises(ParamInvalidError, match=f"model: .* without {everything}"):
        OffloadReplay(REQUESTS, model, OffloadOptions(**options))
    with pytest.raises(ParamInvalidError, match=r"without step_fixed.*step_indexed$"):
        OffloadReplay(REQUESTS, model, OffloadOptions(**options, prefill_tokens_per_s=5e3))
    whole = model.replace(step_fixed=9.0, step_request=1.0, step_attended=0.0, step_indexed=0.0)
    assert OffloadReplay(
        REQUESTS, whole, OffloadOptions(**options, prefill_tokens_per_s=5e3)
    ).run().finished_requests == 2  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tiers", "hbm=0GiB"),
        ("--tiers", "hbm=1GiB,dram=1GiB@0GB/s"),
        ("--tiers", "hbm=1GiB,dram=1GiB", "--tier-policy", "best"),
        ("--tiers", "hbm=1GiB", "--policy", "lru"),
        ("--tiers", "hbm=1GiB", "--pool", "512"),
        ("--tiers", "hbm=1GiB", "--layout", "PA_NZ"),
        ("--tier-policy", "arc"),
        ("--tiers", "hbm=1GiB", "--node-dies", "0"),
    ],
)
def test_the_command_refuses_before_any_work(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    command = ["replay", "--requests", "2", "--model", "qwen3-8b", "--json", str(file), *arguments]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "expected" in shown.err
    assert not file.exists()


def test_the_command_reports_tiers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = ["replay", "--requests", "12", "--model", "qwen3-8b", "--json", str(file)]
    assert main([*command, "--tiers", "hbm=8GiB,dram=8GiB:latency=20us,ssd=1TB@6GB/s"]) == 0
    shown = capsys.readouterr().out
    for text in ("of the prompts' tokens", "GB loaded", "with device memory alone", "host link"):
        assert text in shown
    report = json.loads(file.read_text())
    found = report["tiers"]
    assert [tier["name"] for tier in found["tiers"]] == ["hbm", "dram", "ssd"]
    assert report["baseline"]["latency_ms"]["ttft"]["count"] == 12
