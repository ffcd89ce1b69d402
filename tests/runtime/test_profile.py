# SPDX-License-Identifier: Apache-2.0
"""Device profiles: figures, where they come from, and one's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvcore
from kvcore.runtime import DeviceProfile
from kvcore.runtime.profile import FIGURES


@pytest.mark.parametrize("name", ["A2", "A3", "950"])
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    profile = DeviceProfile.named(name)
    assert profile.name == name
    assert set(profile.figures) == set(FIGURES)
    for key, figure in profile.figures.items():
        assert figure.basis in ("measured", "published", "assumed"), key
        assert len(figure.source) > 10, key
    assert profile["capacity"].basis == "published"


def test_an_a3_is_one_die() -> None:
    assert "one die" in DeviceProfile.named("A3").note
    assert DeviceProfile.named("A3").capacity_bytes == 64 * 2**30


def test_replaced_figures_are_assumed() -> None:
    profile = DeviceProfile.named("A3").replace(h2d_bandwidth=30)
    assert (profile["h2d_bandwidth"].value, profile["h2d_bandwidth"].basis) == (30, "assumed")
    assert profile["hbm_bandwidth"].basis == "published"
    measured = profile.replace(basis="measured", source="a bench of mine", h2d_bandwidth=31)
    assert measured["h2d_bandwidth"].source == "a bench of mine"


def test_one_s_own_file(tmp_path: Path) -> None:
    shipped = Path(kvcore.runtime.__file__).with_name("a3.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(shipped.replace('name = "A3"', 'name = "mine"'))
    profile = DeviceProfile.load(path)
    assert profile.name == "mine"
    with kvcore.Device(profile, clock="model") as dev:
        assert "mine" in repr(dev)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("value = 64", "value = 0"), r"^capacity: expected a finite number > 0"),
        (("value = 64", 'value = "64"'), r"^capacity: expected a number"),
        (("value = 64", ""), r"^capacity: expected a finite number"),
        (('basis = "published"', 'basis = "hearsay"'), r"\.basis: expected one of measured"),
        (("[capacity]", "[capability]"), r"^capability: expected one of capacity"),
        (("[capacity]", "[capacity]\nunit = 3"), r"^capacity: expected value, basis and source"),
        (('name = "A3"', "name = 3"), r"^name: expected"),
        (("[capacity]", "[capacity"), r"^profile: expected a TOML file"),
        (("[launch_cost]", "[launch_cost]\nnote = 1\n[x]"), r"^launch_cost: expected value"),
    ],
)
def test_files_that_are_none(tmp_path: Path, change: tuple[str, str], match: str) -> None:
    path = tmp_path / "bad.toml"
    text = Path(kvcore.runtime.__file__).with_name("a3.toml").read_text()
    path.write_text(text.replace(*change, 1))
    with pytest.raises(kvcore.ParamInvalidError, match=match):
        DeviceProfile.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^profile: expected a readable TOML file"):
        DeviceProfile.load(tmp_path / "none.toml")


def test_missing_figures() -> None:
    with pytest.raises(kvcore.ParamInvalidError, match=r"^capacity: expected .* got nothing$"):
        DeviceProfile("empty", {})
    with pytest.raises(kvcore.ParamInvalidError, match=r"^capacity: expected a table"):
        DeviceProfile.from_dict({"name": "x", "capacity": 64})
