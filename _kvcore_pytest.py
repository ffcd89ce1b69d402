# SPDX-License-Identifier: Apache-2.0
"""kvcore's pytest plugin: tests that know the hardware.

    @pytest.mark.kvcore                 # repeated per SoC, run under the race check
    @pytest.mark.kvcore("A2", "A3")     # of the SoCs asked for, only these

pytest loads this module in every environment that has kvcore, so it stands beside the package and
imports nothing of it before a test asks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ENVIRONMENT = "KVCORE_SOC"
SOCS = ("A2", "A3", "950")
#: The SoC of a unittest test, which has no parameters to say it.
_SOC = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--kvcore-soc, --kvcore-all, --kvcore-races and --kvcore-emulate."""
    group = parser.getgroup("kvcore")
    group.addoption(
        "--kvcore-soc",
        metavar="NAMES",
        help="repeat tests marked kvcore under each of these SoCs' documented limits, "
        f"as in --kvcore-soc={','.join(SOCS)}",
    )
    group.addoption(
        "--kvcore-all",
        action="store_true",
        help="take every test as marked kvcore",
    )
    group.addoption(
        "--kvcore-races",
        action="store_true",
        help="run tests marked kvcore with the runtime's race check: a race fails the test",
    )
    group.addoption(
        "--kvcore-emulate",
        metavar="SOC",
        help="run everything with the vendor's torch_npu on an emulated machine, as in "
        f"--kvcore-emulate={SOCS[1]}",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start the emulated machine before conftest files are imported: they may import torch."""
    soc = early_config.known_args_namespace.kvcore_emulate
    if soc is None:
        return
    from kvcore.emulator import running, start
    from kvcore.errors import KVCoreError

    _known([soc], "--kvcore-emulate")
    already = running()
    if already is not None and already.soc == soc:
        return
    try:
        start(soc)
    except KVCoreError as error:
        raise pytest.UsageError(f"--kvcore-emulate: {error}") from error


def pytest_configure(config: pytest.Config) -> None:
    """The marker, and a wrong SoC told before anything is collected."""
    config.addinivalue_line(
        "markers",
        "kvcore(*socs): repeat per SoC of --kvcore-soc (with names: of these only), and run "
        "under the race check with --kvcore-races",
    )
    _asked(config)


def _asked(config: pytest.Config) -> list[str]:
    """The SoCs of the option, each once."""
    text = config.getoption("--kvcore-soc")
    if text is None:
        return []
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    return _known(names, "--kvcore-soc")


def _known(names: list[Any], where: str) -> list[str]:
    for name in names:
        if name not in SOCS:
            raise pytest.UsageError(
                f"{where}: expected names among {', '.join(SOCS)}, got {name!r}"
            )
    return names


def _mark(item: pytest.Item) -> pytest.Mark | None:
    mark = item.get_closest_marker("kvcore")
    if mark is None and item.config.getoption("--kvcore-all"):
        return pytest.mark.kvcore.mark
    return mark


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Say it when an option had nothing to work on."""
    options = [name for name in ("--kvcore-soc", "--kvcore-races") if config.getoption(name)]
    if not options or not items or any(_mark(item) is not None for item in items):
        return []
    return [
        f"kvcore: {' and '.join(options)} without effect: no test is marked kvcore "
        "(--kvcore-all takes every test)"
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat marked tests."""
    mark = _mark(metafunc.definition)
    if mark is None:
        return
    own = _known(list(mark.args), f"{metafunc.definition.nodeid}: pytest.mark.kvcore")
    socs = [name for name in _asked(metafunc.config) if not own or name in own]
    if metafunc.config.getoption("--kvcore-soc") is None:
        return
    if "kvcore_soc" not in metafunc.fixturenames:
        metafunc.fixturenames.insert(0, "kvcore_soc")
    metafunc.parametrize("kvcore_soc", socs, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Repeat marked tests of unittest classes, which pytest does not parametrize."""
    asked = _asked(config)
    if asked:
        items[:] = [made for item in items for made in _repeated(item, asked)]


def _repeated(item: pytest.Item, asked: list[str]) -> list[pytest.Item]:
    mark = _mark(item)
    parent = item.parent
    if mark is None or parent is None or not getattr(parent, "nofuncargs", False):
        return [item]
    own = _known(list(mark.args), f"{item.nodeid}: pytest.mark.kvcore")
    socs = [name for name in asked if not own or name in own]
    if not socs:
        item.add_marker(pytest.mark.skip(reason=f"marked for {', '.join(own)} only"))
        return [item]
    made: list[pytest.Item] = []
    for soc in socs:
        again = type(item).from_parent(parent, name=item.name, callobj=item.obj)  # type: ignore[attr-defined]
        again.stash[_SOC] = soc
        again.add_report_section("setup", "kvcore", f"under the limits of {soc}")
        made.append(again)
    return made


@pytest.fixture
def kvcore_soc(request: pytest.FixtureRequest) -> str | None:
    """The SoC whose limits hold in this test ("A2", "A3", "950"), or None."""
    name: str | None = getattr(request, "param", None) or os.environ.get(ENVIRONMENT)
    return name or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Hold a marked test, fixtures included, to its SoC, and its devices to the race check."""
    if _mark(item) is None:
        return (yield)
    with contextlib.ExitStack() as stack:
        call = getattr(item, "callspec", None)
        soc = item.stash.get(_SOC, None) if call is None else call.params.get("kvcore_soc")
        if isinstance(soc, str):  # else none of the SoCs asked for is one of the mark's
            stack.enter_context(_environment(soc))
        if item.config.getoption("--kvcore-races"):
            stack.enter_context(_race_check())
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
    """Show an error of kvcore at the test's own line, without the package's frames above it.

    ``--full-trace`` shows them.
    """
    if call.excinfo is not None:
        _hide_frames()
    return (yield)


def _hide_frames() -> None:
    # pytest looks for this name in a frame's globals, for the error itself and for its causes.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "kvcore" and isinstance(module, types.ModuleType):
            vars(module).setdefault("__tracebackhide__", _is_told)


def _is_told(excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
    """Whether the package's frames say nothing: the error is one of its own, or a caller's.

    What else is raised within the package is a fault of the package, whose frames matter then.
    """
    error = sys.modules.get("kvcore.errors")
    if error is not None and isinstance(excinfo.value, error.KVCoreError):
        return True
    last = excinfo.tb
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    found = "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))
    return found.partition(".")[0] != "kvcore"


def _race_check() -> contextlib.AbstractContextManager[None]:
    from kvcore.runtime import default_race_check

    return default_race_check("raise")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[Any]:
    """Devices that modules make when they are imported, as for streams of their own, check too."""
    if not session.config.getoption("--kvcore-races"):
        return (yield)
    with _race_check():
        return (yield)


def _emulated() -> Any:
    """The emulated machine's reports, None where no machine runs in this process."""
    checking = sys.modules.get("kvcore.emulator.checking")
    return None if checking is None or checking.races is None else checking.settled


def _hold_to_reports(item: pytest.Item) -> Iterator[Any]:
    """Fail what was running when the emulated machine found something."""
    reports = _emulated()
    if reports is None:
        return (yield)
    before = set(reports())
    result = yield
    fresh = [report for report in reports() if report not in before]
    if fresh:
        lines = "\n".join(str(report) for report in fresh)
        pytest.fail(f"the emulated machine reports:\n{lines}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[Any]:
    """What fixtures do on the emulated machine is theirs."""
    return (yield from _hold_to_reports(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[Any]:
    """What fixtures do on the emulated machine is theirs."""
    return (yield from _hold_to_reports(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    """Fail a test on whose run the emulated machine found something."""
    return (yield from _hold_to_reports(item))


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_call")
def pytest_runtest_call_settle(item: pytest.Item) -> Iterator[Any]:
    """Have an installation that outlives the test tell its races in the test that made them."""
    installed = sys.modules.get("kvcore.torch.installation")
    if installed is None or not item.config.getoption("--kvcore-races") or _mark(item) is None:
        return (yield)
    try:
        result = yield
    except BaseException:
        with contextlib.suppress(Exception):  # the test's own failure comes first
            _settle(installed)
        raise
    _settle(installed)
    return result


def _settle(installed: Any) -> None:
    found = installed.active()
    if found is not None:
        found.streams.settle()


@contextlib.contextmanager
def _environment(soc: str) -> Iterator[None]:
    """Set the SoC for the process, so that tasks and threads of the test have it too."""
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = soc
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENVIRONMENT]
        else:
            os.environ[ENVIRONMENT] = before


@pytest.fixture
def kvcore_namespace(kvcore_soc: str | None) -> Iterator[Any]:
    """A namespace with torch_npu's KV-cache operators and streams; skips without torch.

    What its device has not told by the end of the test (races, failures) is an error then.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    import kvcore.torch

    with kvcore.torch.install(types.ModuleType("torch_npu"), soc=kvcore_soc) as handle:
        yield handle.ns


@pytest.fixture
def assert_kv_equal() -> Callable[..., None]:
    """kvcore.testing.assert_kv_equal."""
    from kvcore.testing import assert_kv_equal

    return assert_kv_equal
