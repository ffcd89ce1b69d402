# SPDX-License-Identifier: Apache-2.0
"""Measured rows: fitted, predicted by the replay itself, and said what they are worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.errors import ParamInvalidError
from kvcore.replay import Deployment, ModelProfile, OffloadReplay, read_trace
from kvcore.replay.clock.capacity import decode_bytes, most_requests
from kvcore.replay.clock.mean_step import MeanStep
from kvcore.replay.prediction.calibration import calibrated
from kvcore.replay.prediction.measurements import PUBLISHED, MeasuredRow, Measurements
from kvcore.replay.prediction.predict import predict
from kvcore.replay.prediction.rows import RowRuns, row_lines, row_options

ROOT = Path(__file__).parents[2]
FIGURE = 'basis = "assumed"\nsource = "here"\n'
#: A deployment of nobody's model, served in order.
OWN = f"""\
name = "own"
model = "tiny-sparse"
device = "A3"
[figures.serve]
value = "in order"
{FIGURE}
[figures.serve_overlap]
value = 0.9
{FIGURE}
[figures.plan_group]
value = 5.0
{FIGURE}
[serving]
policy = "lru"
pool = 512
"""
WORKLOAD = "[workload]\ninput = 3000\noutput = 40\n"


def deployed(tmp_path: Path, text: str = OWN) -> Deployment:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return Deployment.load(path)


def row(name: str, batch: int, ms: float, **more: Any) -> str:
    lines = {"name": name, "batch": batch, "ms": ms, "use": "fit", **more}
    text = "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in lines.items() if value is not None
    )
    return "[[rows]]\n" + text


def measured(tmp_path: Path, free: list[str], *rows: str, more: str = "") -> Measurements:
    path = tmp_path / "rows.toml"
    head = f'name = "rows"\ndeployment = "own.toml"\nfree = {json.dumps(free)}\n'
    path.write_text(head + more + WORKLOAD + "".join(rows))
    return Measurements.load(path)


def served(
    deployment: Deployment, batch: int, policy: str = "lru", pool: int | None = 512
) -> float:
    """Milliseconds of a step, by the replay, without any of the fitting's code."""
    one = MeasuredRow(
        "", "", policy, pool if policy != "none" else None, batch, 3000, 40, None, 1.0, "ms",
        "fit", False, "", None, None,
    )  # fmt: skip
    requests = read_trace(row_lines(one))
    step = OffloadReplay(requests, deployment, row_options(one, deployment)).run().step_us
    assert step is not None
    return step / 1e3


# ---------------------------------------------------------------- fitting
def test_figures_that_were_put_in_come_out(tmp_path: Path) -> None:
    truth = deployed(tmp_path).replace(step_fixed=777.0, h2d_descriptor=0.4)
    names = [("none 2", 2, "none"), ("lru 2", 2, "lru"), ("lru 4", 4, "lru")]
    times = {name: served(truth, batch, policy) for name, batch, policy in names}
    rows = [row(name, batch, times[name], policy=policy) for name, batch, policy in names]
    found = calibrated(measured(tmp_path, ["step_fixed", "h2d_descriptor"], *rows))
    assert found.values == pytest.approx((777.0, 0.4), rel=2e-3)
    assert found.start == (500.0, 0.05)
    assert max(map(abs, found.residuals)) < 1e-3
    assert (found.rank, found.loose) == (2, ())
    fitted = found.deployment
    assert fitted.figures["h2d_descriptor"].basis == "fitted"
    assert fitted.figures["h2d_descriptor"].rows == 3
    # A row that was not fitted, by the fitted deployment and by the true one.
    assert served(fitted, 3) == pytest.approx(served(truth, 3), rel=2e-3)


def test_a_mode_has_figures_of_its_own(tmp_path: Path) -> None:
    plain = deployed(tmp_path)
    fast, slow = plain.replace(step_fixed=400.0), plain.replace(step_fixed=900.0)
    rows = [
        row("a", 2, served(fast, 2, "none"), policy="none", mode="fast"),
        row("b", 2, served(slow, 2, "none"), policy="none", mode="slow"),
    ]
    found = calibrated(
        measured(tmp_path, ["step_fixed"], *rows, more='per_mode = ["step_fixed"]\n')
    )
    assert list(map(str, found.parameters)) == ["step_fixed (fast)", "step_fixed (slow)"]
    assert found.values == pytest.approx((400.0, 900.0), rel=1e-4)
    assert found.of_mode("slow").number("step_fixed") == pytest.approx(900.0, rel=1e-4)
    assert found.deployment.number("step_fixed") == pytest.approx(400.0, rel=1e-4)


def test_what_no_row_tells_apart_is_named(tmp_path: Path) -> None:
    plain = deployed(tmp_path)
    # At one batch the part of a step and the part of a request are one figure.
    rows = [row("a", 2, 1.2 * served(plain, 2, "none"), policy="none")]
    found = calibrated(measured(tmp_path, ["step_fixed", "step_request"], *rows))
    assert found.rank == 1
    assert found.loose == ("step_fixed", "step_request")
    assert max(map(abs, found.residuals)) < 1e-4
    said = predict(measured(tmp_path, ["step_fixed", "step_request"], *rows)).verdict
    assert "fitted, predicts nothing" in said


def test_rows_that_determine_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(tmp_path)
    rows = [row("a", 2, 1.0, policy="none")]
    measured(tmp_path, ["h2d_descriptor"], *rows)  # of what such a row reads nothing
    out = tmp_path / "out.toml"
    assert main(["calibrate", str(tmp_path / "rows.toml"), "--write", str(out)]) == 2
    assert "rows: expected rows whose time depends on h2d_descriptor" in capsys.readouterr().err
    assert not out.exists()
    for free, uses, match in (
        ([], "fit", "free: expected figures to fit, or rows of a table, got neither"),
        (["step_fixed"], "predict", "rows: expected rows to fit step_fixed to"),
    ):
        measured(tmp_path, free, row("a", 2, 1.0, policy="none", use=uses))
        assert main(["calibrate", str(tmp_path / "rows.toml")]) == 2
        assert match in capsys.readouterr().err


def test_rows_of_a_table_become_the_deployments(tmp_path: Path) -> None:
    deployed(tmp_path)
    rows = [
        row(f"none {batch}", batch, ms, policy="none", use="table")
        for batch, ms in ((1, 2.0), (2, 2.5), (4, 3.0))
    ]
    found = calibrated(measured(tmp_path, [], *rows))
    table = found.deployment.table
    assert table is not None
    assert (table.batches, table.basis) == ((1, 2, 4), "measured")
    assert served(found.deployment, 3, "none") == pytest.approx(2.75)
    assert len(found.table_rows) == 3


# ---------------------------------------------------------------- predicting
def test_a_prediction_beside_what_knows_nothing(tmp_path: Path) -> None:
    plain = deployed(tmp_path)
    rows = [
        row("none", 2, served(plain, 2, "none"), policy="none"),
        row("lru 2", 2, served(plain, 2)),
        row("lru 6", 6, 1.1 * served(plain, 6), use="predict", independent=True, because="so"),
        row("fifo", 6, 1.0, policy="fifo", use="predict", because="no"),
    ]
    found = predict(measured(tmp_path, ["step_fixed"], *rows))
    assert [one.row.name for one in found.of("fit")] == ["none", "lru 2"]
    third = found.of("predict")[0]
    assert third.error == pytest.approx(1 / 1.1 - 1, rel=1e-6)
    assert found.independent == 1
    assert "1 free figures, fitted to 2 rows; 2 predictions, 1 of them independent" in found.verdict
    # All but computation by the misses, of one fitted row; and that row itself.
    two = found.of("fit")[1]
    parts = two.parts_ms
    each = (two.row.ms - parts["compute"]) / two.report.totals.misses * two.report.totals.steps
    misses = third.report.totals.misses / third.report.totals.steps
    assert third.nulls["misses only"] == pytest.approx(
        third.parts_ms["compute"] + each * misses, rel=1e-3
    )
    assert third.nulls["same as lru 2"] == two.row.ms
    assert third.points is not None
    assert third.points <= 0
    # The figure that is fitted is not among those that are assumed; the misses are.
    assert "step_fixed" not in third.moved
    assert {"h2d_descriptor", "serve_overlap", "misses of all rows"} <= set(third.moved)
    low, high = third.moved["step_request"]
    # Fitted anew at batch 2, so the part of a request counts four times at batch 6: 10 us each.
    share = 4 * 10.0 * 0.5 / 1e3 / third.ms
    assert high == pytest.approx(share, rel=0.05)
    assert low == pytest.approx(-share * 2 / 3, rel=0.05)


def test_the_mean_step_takes_what_the_run_took(tmp_path: Path) -> None:
    for text in (OWN, OWN.replace('"in order"', '"ahead"')):
        deployment = deployed(tmp_path, text)
        one = measured(tmp_path, ["step_fixed"], row("a", 4, 1.0)).rows[0]
        report = RowRuns().run(one, deployment)
        mean = MeanStep.of(report, 3020)
        assert report.step_us is not None
        assert mean.us(deployment) == pytest.approx(report.step_us, rel=0.02)
        more = mean.with_hit_rate(deployment, 0.01)
        assert mean.misses - more.misses == pytest.approx(0.01 * 4 * 256)
        assert more.hits + more.misses == pytest.approx(mean.hits + mean.misses)


def test_a_prediction_is_a_run_of_the_replay(tmp_path: Path) -> None:
    """GLM-5.2 with drafts and either pool: ``kvcore predict`` and the command that it names."""
    rows = "".join(
        row(f"{pool}", 4, 100.0, use="predict", policy="fifo", pool=pool) for pool in (8192, 16_384)
    )
    path = tmp_path / "glm.toml"
    path.write_text(
        'name = "glm"\ndeployment = "glm-5.2"\n[workload]\ninput = 65536\noutput = 64\n' + rows
    )
    out = tmp_path / "out.json"
    traces = tmp_path / "traces"
    assert main(["predict", str(path), "--json", str(out), "--traces", str(traces)]) == 0
    predicted = json.loads(out.read_text())["rows"]
    assert [one["pool"] for one in predicted] == [8192, 16_384]
    for place, one in enumerate(predicted):
        words = one["command"]
        words[words.index("TRACE")] = str(traces / f"row{place}.jsonl")
        assert words[:2] == ["kvcore", "replay"]
        assert main([*words[1:], "--json", str(out)]) == 0
        replayed = json.loads(out.read_text())
        assert replayed["deployment"] == one["deployment"]
        assert replayed["options"]["drafts"] == 3
        assert replayed["model_time_us"]["step"] == pytest.approx(1e3 * one["ms"], rel=1e-3)
        for key in ("step", "compute", "plan", "serve", "link"):
            both = replayed["model_time_us"][key], one["model_time_us"][key]
            assert both[0] == pytest.approx(both[1], rel=1e-3)
            assert both[0] > 0
        assert replayed["hit_rate"] == pytest.approx(one["hit_rate"], rel=1e-3)
        assert replayed["bytes"] == pytest.approx(one["bytes"], rel=1e-3)
        assert replayed["memory"] == one["memory"]


@pytest.mark.timeout(300)
def test_glm_5_2_as_the_page_has_it() -> None:
    found = predict(Measurements.find("glm-5.2"))
    by_name = {one.row.name: one for one in found.rows}
    # The shipped figures are those that the fit finds.
    assert max(abs(one.error) for one in found.of("fit")) < 1e-3
    large, small = by_name["GE graph, 16K"], by_name["GE graph, 8K"]
    published = 1 - 92.03 / 100.55
    assert 1 - large.ms / small.ms == pytest.approx(published, abs=0.02)
    assert max(abs(one.error) for one in found.of("predict")) < 0.05
    assert found.independent == 1
    assert large.row.independent
    # Two more points of hits move it, if by little: device memory is what it waits for.
    assert large.points is not None
    assert -0.02 < large.points < -1e-4
    assert max(large.moved, key=lambda key: max(map(abs, large.moved[key]))) == "hbm_descriptor"
    assert by_name["NPUGraph, 8K"].hit_rate_of_queries == pytest.approx(0.86, abs=0.015)
    assert large.hit_rate_of_queries == pytest.approx(0.93, abs=0.015)


def test_deepseek_is_a_fit_and_says_so() -> None:
    of = Measurements.find("deepseek-v3.2")
    found = calibrated(of)
    assert found.rank == 3
    assert max(map(abs, found.residuals)) < 0.01
    for parameter, value in zip(found.parameters, found.values, strict=True):
        assert of.deployment.number(parameter.key) == pytest.approx(value, rel=1e-3)
    assert "fitted, predicts nothing" in predict(of).verdict


@pytest.mark.timeout(300)
def test_hisparse_meets_its_rows_as_the_page_has_it() -> None:
    of = Measurements.find("hisparse")
    assert [one.batch for one in of.of("table")] == [1, 2, 4, 6]
    assert [one.batch for one in of.of("fit")] == [8, 32]
    assert [one.batch for one in of.of("predict")] == [2, 4, 16, 54]
    assert [one.batch for one in of.of("show")] == [1]
    found = predict(of)
    for one in found.of("predict"):
        assert one.ratio_error is not None
        assert abs(one.ratio_error) < 0.15
    extrapolated = {
        one.row.batch: one.to_dict()["deployment"]["extrapolated"] for one in found.rows
    }
    assert extrapolated[4] is None
    assert extrapolated[54]["batch"] == 9
    shipped, table = of.deployment.table, of.table()
    assert shipped is not None
    assert table is not None
    assert (shipped.batches, shipped.contexts) == (table.batches, table.contexts)
    for (ours,), (theirs,) in zip(shipped.us, table.us, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


# ---------------------------------------------------------------- files
def test_a_fitted_deployment_is_written_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = deployed(tmp_path, OWN.replace('name = "own"', 'name = "own \\u00e9 \\u007f"'))
    times = [served(plain, 2, "none"), served(plain, 4, "none")]
    rows = [row(str(n), n, ms, policy="none") for n, ms in zip((2, 4), times, strict=True)]
    measured(tmp_path, ["step_fixed"], *rows)
    out, figures = tmp_path / "out.toml", tmp_path / "out.json"
    words = ["calibrate", str(tmp_path / "rows.toml")]
    assert main([*words, "--write", str(out), "--json", str(figures)]) == 0
    said = json.loads(figures.read_text())
    again = Deployment.load(out)
    assert again.digest == said["hash"]
    assert again.name == "own \u00e9 \x7f"
    assert said["free"]["step_fixed"]["value"] == pytest.approx(500.0, rel=1e-6)
    assert [one["name"] for one in said["rows"]] == ["2", "4"]
    shown = capsys.readouterr().out
    assert "1 free figures, 2 rows, 1 combinations determined" in shown
    assert main([*words, "--write", str(tmp_path / "rows.toml")]) == 2
    assert "a file of its own" in capsys.readouterr().err
    assert main([*words, "--write", str(tmp_path / "missing" / "x.toml")]) == 2


@pytest.mark.parametrize("name", ["glm-5.2", "hisparse"])
def test_a_shipped_deployment_survives_writing(name: str, tmp_path: Path) -> None:
    from kvcore.replay.deployments.write import as_toml

    deployment = Deployment.named(name)
    path = tmp_path / "copy.toml"
    path.write_text(as_toml(deployment))
    assert Deployment.load(path).digest == deployment.digest


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_say_where_they_are_from(name: str) -> None:
    found = Measurements.find(name)
    assert found.source
    assert all(one.because for one in found.of("predict"))


GOOD = 'free = ["step_fixed"]\n' + WORKLOAD + row("a", 2, 1.0, policy="none")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (('"step_fixed"', '"speed"'), "free: expected figures of own"),
        (('"step_fixed"', '"step_fixed", "step_fixed"'), "free: expected each figure once"),
        (('"step_fixed"', '"ids.overlap"'), "free: expected ids of the kind turnover"),
        (('["step_fixed"]', "3"), "free: expected a list of figures"),
        (("free =", 'per_mode = ["step_request"]\nfree ='), "per_mode: expected figures that are"),
        (("free =", "fre ="), "fre: expected one of name, deployment"),
        (("input = 3000", "input = 0"), r"rows\[0\]\.input: expected an integer from 1"),
        (("output = 40", "length = 40"), "workload: expected a table of input and output"),
        (("ms = 1.0", "ms = 0"), r"rows\[0\]\.ms: expected a number above 0"),
        (("ms = 1.0", "ms = inf"), r"rows\[0\]\.ms: expected a number above 0"),
        (("ms = 1.0", "ms = true"), r"rows\[0\]\.ms: expected a number above 0"),
        (("ms = 1.0", ""), r"rows\[0\]: expected either ms or tokens_per_s, got neither"),
        (("ms = 1.0", "ms = 1\ntokens_per_s = 2"), r"rows\[0\]: expected either ms or tokens"),
        (("input = 3000", "input = 100000000"), r"rows\[0\]\.input: expected an integer from 1"),
        (("batch = 2", "batch = 4000\ninput = 40000"), r"rows\[0\]\.batch: expected at most 1342"),
        (("batch = 2", "batch = 5000"), r"rows\[0\]\.batch: expected an integer from 1 to 4096"),
        (("batch = 2", "batch = 2\nsize = 3"), r"rows\[0\]\.size: expected one of name, mode"),
        (('use = "fit"', 'use = "guess"'), r"rows\[0\]\.use: expected one of fit, predict"),
        (('policy = "none"', 'policy = "mru"'), r"rows\[0\]\.policy: expected one of previous"),
        (('use = "fit"', 'use = "table"\npool = 0'), r"rows\[0\]\.pool: expected an integer"),
        (("batch = 2", "batch = 2\nratio = 2.0"), r"rows\[0\]\.ratio: expected together"),
        (("batch = 2", 'batch = 2\nratio = 2.0\nagainst = "b"'), r"rows\[0\]\.against"),
        (("[[rows]]", "[rows]"), "rows: expected 1 to 1000 rows"),
        (("[[rows]]", '[modes]\nx = 3\n[[rows]]'), r"modes\.x: expected tables of value"),
    ],
)  # fmt: skip
def test_broken_measurements(
    tmp_path: Path, change: tuple[str, str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(tmp_path)
    path = tmp_path / "rows.toml"
    text = 'name = "rows"\ndeployment = "own.toml"\n' + GOOD
    path.write_text(text)
    assert Measurements.load(path).rows[0].ms == 1
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(ParamInvalidError, match=match):
        Measurements.load(path)
    for command in ("predict", "calibrate"):
        assert main([command, str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_row_that_cannot_be_served_is_refused_before_any_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(tmp_path)
    rows = [row("good", 2, 1.0, policy="none"), row("small", 2, 1.0, policy="lru", pool=8)]
    measured(tmp_path, ["step_fixed"], *rows)
    for command in ("predict", "calibrate"):
        assert main([command, str(tmp_path / "rows.toml")]) == 2
        shown = capsys.readouterr()
        assert "row small: expected one that can be served, got pool: expected" in shown.err
        assert not shown.out


def test_what_is_no_file_of_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for named in ("glm", str(tmp_path / "missing.toml"), str(tmp_path)):
        for command in ("predict", "calibrate"):
            assert main([command, named]) == 2
            assert "measurements: expected" in capsys.readouterr().err


# ---------------------------------------------------------------- what fits
@pytest.mark.parametrize(
    ("before", "after"),
    # The published limits without and with offload: batch of 128 dies, length.
    [((1024, 65_536), (2048, 65_536)), ((128, 262_144), (128, 393_216))],
)
def test_deepseek_grows_as_published(before: tuple[int, int], after: tuple[int, int]) -> None:
    """The budget that the row without offload sets holds the larger one only with offload."""
    model, dies = ModelProfile.named("deepseek-v3.2-c8"), 128
    budget = decode_bytes(model, before[0] // dies, before[1])
    larger = after[0] // dies, after[1]
    assert decode_bytes(model, *larger) > budget
    assert decode_bytes(model, *larger, drafts=3, pool=0) <= budget
    assert most_requests(model, budget, after[1], drafts=3, pool=0) * dies >= after[0]
    # Without offload the budget is one row's: it holds that row and no more.
    assert most_requests(model, budget, before[1]) * dies == before[0]


def test_glm_doubles_its_batch_as_published() -> None:
    model = ModelProfile.named("glm-5.2")
    budget = decode_bytes(model, 2, 65_536)  # batch 64 of 32 dies
    assert most_requests(model, budget, 65_536) * 32 == 64
    for pool in (8192, 16_384):
        assert most_requests(model, budget, 65_536, drafts=3, pool=pool) * 32 >= 128
