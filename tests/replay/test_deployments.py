# SPDX-License-Identifier: Apache-2.0
"""Deployments: read, refused, put on another device; a replay takes its times from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.cli import main
from kvcore.errors import ParamInvalidError
from kvcore.replay import (
    DEPLOYMENTS,
    Deployment,
    ModelProfile,
    OffloadOptions,
    OffloadReplay,
    read_trace,
)
from kvcore.replay.clock.compute_time import ComputeTime
from kvcore.replay.clock.in_order import InOrderClock
from kvcore.replay.deployments.step_table import StepTable
from kvcore.runtime.profile import DeviceProfile

FIGURE = 'basis = "assumed"\nsource = "here"\n'
OWN = f"""\
name = "own"
model = "tiny-sparse"
device = "A3"
[parallel]
dp = 4
ep = 4
[serving]
policy = "fifo"
pool = 512
[figures.serve]
value = "in order"
{FIGURE}
[figures.serve_overlap]
value = 0.75
{FIGURE}
[figures.plan_group]
value = 11.0
{FIGURE}
[figures.step_fixed]
value = 900.0
basis = "fitted"
source = "two rows"
rows = 2
residuals = [0.01, -0.01]
"""


def own(tmp_path: Path, text: str = OWN) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def lines() -> list[bytes]:
    """Six short requests that share nothing."""
    return [
        json.dumps({
            "timestamp": n, "input_length": 700 + 50 * n, "output_length": 12 + n,
            "hash_ids": [10 * n, 10 * n + 1],
        }).encode()
        for n in range(6)
    ]  # fmt: skip


def replayed(model: ModelProfile | Deployment, **options: Any) -> dict[str, Any]:
    chosen = OffloadOptions(
        **{"pool": 512, "batch": 3, "verify_samples": 20, "host_blocks": 64, **options}
    )
    return OffloadReplay(read_trace(lines()), model, chosen).run().to_dict()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_those_that_ship_load_and_say_where_each_figure_comes_from(name: str) -> None:
    found = Deployment.named(name)
    assert found.name == name == Deployment.find(name).name
    assert found.digest == Deployment.named(name).digest
    assert all(figure.source for figure in found.figures.values())
    assert set(found.assumed()) <= set(found.timing())
    assert found.digest != found.replace(h2d_descriptor=1.0).digest


# ---------------------------------------------------------------- the table of steps
TABLE = StepTable((1, 2, 4), (1000, 3000), ((10, 12), (14, 18), (16, 24)), "measured", "here")


@pytest.mark.parametrize(
    ("batch", "context", "us", "beyond"),
    [
        (1, 1000, 10.0, (1, 1)),
        (4, 3000, 24.0, (1, 1)),
        (2, 2000, 16.0, (1, 1)),
        (3, 2000, 18.0, (1, 1)),  # between (14 + 18) / 2 and (16 + 24) / 2
        (8, 1000, 20.0, (2, 1)),  # 1 a request, as from 2 to 4
        (4, 6000, 36.0, (1, 2)),  # 4 for a thousand tokens, as from 1000 to 3000
        (0.5, 1000, 8.0, (2, 1)),
    ],
)
def test_a_table_is_interpolated_and_continued(
    batch: float, context: float, us: float, beyond: tuple[float, float]
) -> None:
    assert TABLE.at(batch, context) == pytest.approx(us)
    assert TABLE.beyond(batch, context) == pytest.approx(beyond)


def test_a_table_of_one_length_is_the_same_for_all_and_says_so() -> None:
    table = StepTable((1, 2), (32_768,), ((5,), (7,)), "measured", "here")
    assert table.at(3, 99) == 9
    assert table.beyond(2, 33_000) == (1, 1)  # as good as the same
    assert table.beyond(2, 65_536) == (1, 2)
    falling = StepTable((1, 2), (1,), ((5,), (1,)), "measured", "here")
    assert falling.at(9, 1) == 0  # no time runs backwards


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batch": [2, 1]}, r"step_table\.batch: expected 1 to 1024 numbers above 0, ascending"),
        ({"batch": []}, r"step_table\.batch"),
        ({"context": [0]}, r"step_table\.context"),
        ({"context": [True]}, r"step_table\.context"),
        ({"us": [[1.0]]}, r"step_table\.us: expected 2 rows of 1 numbers above 0"),
        ({"us": [[1.0], [math.nan]]}, r"step_table\.us"),
        ({"us": [[1.0], [-1]]}, r"step_table\.us"),
        ({"us": 3}, r"step_table\.us"),
        ({"basis": "guessed"}, r"step_table\.basis: expected one of measured"),
        ({"source": ""}, r"step_table\.source: expected where the times come from"),
        ({"more": 3}, r"step_table: expected a table of batch, context, us, basis and source"),
    ],
)
def test_broken_tables(change: dict[str, Any], match: str) -> None:
    good = {"batch": [1, 2], "context": [8], "us": [[1.0], [2]], "basis": "measured", "source": "x"}
    assert StepTable.of(good).at(1, 8) == 1
    assert StepTable.of(good).to_dict() == good
    with pytest.raises(ParamInvalidError, match=match):
        StepTable.of({**good, **change})


def test_steps_outside_the_table_are_marked(tmp_path: Path) -> None:
    table = "[step_table]\nbatch = [1, 2]\ncontext = [4000]\nus = [[500.0], [600.0]]\n"
    path = own(tmp_path, OWN + table + 'basis = "measured"\nsource = "a profiler"\n')
    deployment = Deployment.load(path)
    compute = ComputeTime(deployment, 0)
    assert compute.of(np.array([4000, 4000])).us == 600
    assert compute.beyond == (1, 1)
    assert compute.of(np.array([4000] * 5)).us == pytest.approx(900)
    assert compute.beyond == (2.5, 1)
    report = replayed(deployment)["deployment"]
    assert report["step_table"] == "measured"
    assert report["extrapolated"]["batch"] == 1.5  # three requests at most
    assert replayed(Deployment.load(own(tmp_path)))["deployment"]["extrapolated"] is None


# ---------------------------------------------------------------- the order of a step
def test_a_step_in_order_is_the_sum_of_its_parts() -> None:
    deployment = Deployment.named("glm-5.2").replace(
        plan_group=40.0, serve_overlap=0.75, hbm_latency=1.0, hbm_descriptor=0.002,
        hbm_bandwidth=1600.0, h2d_latency=6.0, h2d_descriptor=0.0144, h2d_bandwidth=40.0,
    )  # fmt: skip
    wanted, missed = 32_768.0, 4_000.0

    def serve(rows: float, read: float) -> float:
        hbm = 1.0 + rows * 2 * 0.002 + (2 * rows - read) * 1152 / 1600e3
        link = 6.0 + read * 2 * 0.0144 + read * 1152 / 40e3
        return max(hbm, link) + 0.25 * min(hbm, link)

    rows = np.zeros((21, 3))
    rows[:, 0], rows[:, 1] = wanted - missed, missed
    clock = InOrderClock(deployment, lanes=2)
    times = clock.step(rows, 16, 16, 16, 1000.0)
    waited = 78 * serve(wanted, missed) + serve(wanted, wanted * 0.4115)
    assert times.serve_us == pytest.approx(waited)
    assert times.plan_us == pytest.approx(21 * 40)
    assert times.us == pytest.approx(78_000 + 840 + waited) == clock.now
    assert clock.peek(rows, 16, 16, 16, 0.0).us == pytest.approx(840 + waited)
    assert clock.now == times.us
    # Without offload there is nothing to plan and nothing to serve.
    assert clock.step(0 * rows, 16, 0, 0, 1000.0).us == pytest.approx(78_000)


def test_a_replay_takes_its_times_from_the_deployment(tmp_path: Path) -> None:
    deployment = Deployment.load(own(tmp_path))
    for fidelity in ("full", "sampled"):
        plain = replayed(ModelProfile.named("tiny-sparse"), fidelity=fidelity)
        ours = replayed(deployment, fidelity=fidelity)
        # What is moved is the same; what it takes is not.
        assert ours["hit_rate"] == plain["hit_rate"]
        assert ours["bytes"] == plain["bytes"]
        time, steps = ours["model_time_us"], ours["steps"]
        assert time["plan"] == pytest.approx(steps * 3 * 11.0)
        parts = time["compute"] + time["plan"] + time["serve"]
        assert time["decode"] == pytest.approx(parts, rel=1e-9)
        assert time["compute"] == pytest.approx(plain["model_time_us"]["compute"] + 400 * steps)
        assert plain["model_time_us"]["plan"] == 0
        said = ours["deployment"]
        assert (said["name"], said["hash"]) == ("own", deployment.digest)
        assert said["basis"]["step_fixed"] == "fitted"
        assert plain["deployment"]["from_file"] is False


def test_full_and_sampled_agree_in_order(tmp_path: Path) -> None:
    deployment = Deployment.load(own(tmp_path))
    full, sampled = (
        replayed(deployment, fidelity=fidelity, sample_layers=3, sample_requests=6)
        for fidelity in ("full", "sampled")
    )
    for key in ("step", "compute", "plan", "serve"):
        assert sampled["model_time_us"][key] == pytest.approx(full["model_time_us"][key], rel=0.01)
    assert sampled["memory"]["peak_device_bytes"] == full["memory"]["peak_device_bytes"]


# ---------------------------------------------------------------- another device
def test_another_device_needs_figures_of_its_own(tmp_path: Path) -> None:
    path = own(tmp_path)
    with pytest.raises(ParamInvalidError, match=r"device: expected a device that own has figures"):
        replayed(Deployment.load(path), device="A2")
    step = "".join(
        f"[on.A2.figures.{key}]\nvalue = {value}\n{FIGURE}"
        for key, value in (
            ("step_fixed", 100.0), ("step_request", 1.0), ("step_attended", 0.0),
            ("step_indexed", 0.0),
        )
    )  # fmt: skip
    there = Deployment.load(own(tmp_path, OWN + step)).on("A2")
    assert there.device.name == "A2"
    assert there.model.step_us(3, 1000) == 103
    assert there.serve == "ahead"  # nothing of the other device's step is taken over
    assert replayed(Deployment.load(path), device="A3")["device"] == "A3"
    with pytest.raises(ParamInvalidError, match=r"3 figures more of own: step_request .*indexed"):
        Deployment.load(own(tmp_path, OWN + step.partition("[on.A2.figures.step_request]")[0])).on(
            "A2"
        )


def test_a_profile_like_the_device_changes_what_it_says(tmp_path: Path) -> None:
    a3 = DeviceProfile.named("A3")
    text = 'name = "mine"\nlike = "A3"\n' + "".join(
        f"[{key}]\nvalue = {7.0 if key == 'h2d_latency' else a3.value(key)}\n{FIGURE}"
        for key in a3.figures
    )
    profile = tmp_path / "mine.toml"
    profile.write_text(text)
    more = f"[figures.h2d_descriptor]\nvalue = 0.5\n{FIGURE}"
    deployment = Deployment.load(own(tmp_path, OWN + more)).on(str(profile))
    assert deployment.device.value("h2d_latency") == 7
    assert deployment.device.value("h2d_descriptor") == 0.5
    assert deployment.model.step_fixed_us() == 900


# ---------------------------------------------------------------- parallel set-up
def test_heads_are_divided_and_stages_share_their_memory(tmp_path: Path) -> None:
    text = 'name = "dense"\nmodel = "llama-3-8b"\ndevice = "A3"\n[parallel]\ntp = {}\npp = 2\n'
    one = Deployment.load(own(tmp_path, text.format(1)))
    four = Deployment.load(own(tmp_path, text.format(4)))
    many = Deployment.load(own(tmp_path, text.format(16)))
    assert four.model.token_bytes * 4 == one.model.token_bytes
    assert many.model.token_bytes * 8 == one.model.token_bytes  # a head on two devices each
    assert one.device.capacity_bytes == 2 * DeviceProfile.named("A3").capacity_bytes
    with pytest.raises(ParamInvalidError, match=r"parallel\.tp: expected a divisor or a multiple"):
        Deployment.load(own(tmp_path, text.format(3)))
    # Latent attention keeps one head, which every device has.
    latent = 'name = "latent"\nmodel = "glm-5.2"\ndevice = "A3"\n[parallel]\ntp = 8\n'
    assert Deployment.load(own(tmp_path, latent)).model.token_bytes == 91_008


# ---------------------------------------------------------------- what is refused
def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    bare = own(tmp_path, 'name = "bare"\n[figures.serve]\nvalue = "in order"\n' + FIGURE)
    with pytest.raises(ParamInvalidError) as caught:
        Deployment.load(bare)
    for name in ("layers", "topk", "step_fixed", "step_indexed", "plan_group", "h2d_bandwidth"):
        assert name in str(caught.value)
    # A table of steps takes the place of the linear figures.
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2,
                                  "num_attention_heads": 2, "hidden_size": 64}))  # fmt: skip
    head = 'name = "c"\nmodel = "config.json"\ndevice = "A3"\n'
    with pytest.raises(ParamInvalidError, match=r"4 figures more of c: step_fixed .*step_indexed"):
        Deployment.load(own(tmp_path, head))
    table = "[step_table]\nbatch = [1]\ncontext = [1]\nus = [[1.0]]\n" + FIGURE
    assert Deployment.load(own(tmp_path, head + table)).table is not None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (('name = "own"', "name = 3"), "name: expected the deployment's name"),
        (('name = "own"', 'name = "own"\nmore = 1'), "more: expected one of name, model"),
        (('model = "tiny-sparse"', 'model = "gpt"'), "model: expected one of tiny"),
        (('device = "A3"', 'device = "H100"'), "device: expected one of A2, A3, 950"),
        (("dp = 4", "dp = 0"), r"parallel\.dp: expected an integer from 1"),
        (("ep = 4", "ep = 5"), r"parallel\.ep: expected at most the 4 devices"),
        (("dp = 4", "cp = 4"), "parallel: expected a table of tp, ep, dp and pp"),
        (("pool = 512", 'pool = "512"'), r"serving\.pool: expected an integer from 1"),
        (("pool = 512", "seed = 3"), r"serving\.seed: expected one of policy"),
        (("value = 0.75", "value = 1.5"), r"figures\.serve_overlap\.value: expected in"),
        (("value = 0.75", "value = nan"), r"figures\.serve_overlap\.value"),
        (("value = 0.75", "value = true"), r"figures\.serve_overlap\.value"),
        (('value = "in order"', 'value = "late"'), r"figures\.serve\.value: expected one of ahead"),
        (("[figures.serve_overlap]", "[figures.overlap]"), r"figures\.overlap: expected one of"),
        (("value = 900.0", "value = -1"), "step_fixed: expected us a step"),
        (("rows = 2\n", ""), "rows and residuals of a fitted figure"),
        (('"fitted"', '"published"'), "rows and residuals of a fitted figure"),
        (('"fitted"', '"guessed"'), r"figures\.step_fixed\.basis: expected one of measured"),
        (("residuals = [0.01, -0.01]", "residuals = [nan]"), "residuals: expected a list of"),
        (('source = "two rows"', 'source = ""'), r"figures\.step_fixed\.source"),
        (("[serving]", "[serving"), "deployment: expected a TOML file"),
        (("[serving]", "[ids]\nkind = 'dice'\nbasis = 'assumed'\nsource = 'x'\n[serving]"),
         r"ids\.kind: expected one of scores, turnover"),
        (("[serving]", "[ids]\nkind = 'turnover'\nrho = 1\nbasis = 'assumed'\nsource = 'x'\n"
          "[serving]"), r"ids\.rho: expected one of overlap, reuse, distance"),
        (("[serving]", "[on.A2]\nsteps = 1\n[serving]"), r"on\.A2: expected figures and a"),
    ],
)  # fmt: skip
def test_broken_files(tmp_path: Path, change: tuple[str, str], match: str) -> None:
    assert change[0] in OWN
    with pytest.raises(ParamInvalidError, match=match):
        Deployment.load(own(tmp_path, OWN.replace(*change)))


def test_what_is_no_deployment_is_refused(tmp_path: Path) -> None:
    for name in (None, 3, "glm", "missing.toml", str(tmp_path), "a\0b.toml"):
        with pytest.raises(ParamInvalidError, match="deployment"):
            Deployment.find(name)  # type: ignore[arg-type]
    with pytest.raises(ParamInvalidError, match="model: expected a ModelProfile or a Deployment"):
        OffloadReplay(read_trace(lines()), "glm-5.2", OffloadOptions())  # type: ignore[arg-type]


# ---------------------------------------------------------------- the command
def test_the_command_takes_a_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, trace = own(tmp_path), tmp_path / "out.json", tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(lines()))
    words = ["replay", str(trace), "--deployment", str(path), "--blocks", "64"]
    assert main([*words, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["deployment"]["name"] == "own"
    assert (report["options"]["policy"], report["options"]["pool"]) == ("fifo", 512)
    assert report["options"]["device"] == "A3"
    assert "own (EP 4, DP 4; each layer waits for its rows" in capsys.readouterr().out
    assert main([*words, "--pool", "1024", "--policy", "lru", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["options"]["pool"] == 1024  # what is written wins
    for more, match in (
        (["--model", "tiny"], "--model: expected no model together with --deployment"),
        (["--device", "950"], "device: expected a device that own has figures for (A3)"),
        (["--json", str(path)], "own.toml: expected a file of its own"),
    ):
        assert main([*words, *more]) == 2
        assert match in capsys.readouterr().err
    assert main(["replay", "--deployment", "nobody"]) == 2
    assert "deployment: expected one of glm-5.2" in capsys.readouterr().err
