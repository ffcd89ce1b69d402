# SPDX-License-Identifier: Apache-2.0
"""What is installed here for the emulated machine, and what is missing."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__all__ = [
    "CANN_VERSION",
    "HOME",
    "LIBRARIES",
    "PAIR",
    "Wheels",
    "build_fault",
    "facts",
    "missing_libraries",
    "platform_fault",
    "wheels",
]

#: What ASCEND_HOME_PATH names: the layout of an installed CANN, inside this package.
HOME = Path(__file__).parent / "installation"

#: Loaded in this order; each needs only those before it.  The first holds the machine itself.
LIBRARIES = (
    "lib64/libkvcore_cann.so",
    "lib64/libascendcl.so",
    "lib64/libacl_rt.so",
    "lib64/libhccl.so",
    "lib64/libacl_op_compiler.so",
    "lib64/libge_runner.so",
    "lib64/libgraph.so",
    "lib64/libacl_tdt_channel.so",
    "lib64/libruntime.so",
    "lib64/libnnopbase.so",
    "lib64/libopapi.so",
    "opp/vendors/customize/op_api/lib/libcust_opapi.so",
)

#: What the machine says it is: the newest CANN that the release notes of the pair name.
CANN_VERSION = "8.5.0"

#: The pair that the extra ``npu`` pins and the tests run against.
PAIR = ("2.13.0", "2.13.0")

INSTALL = (
    f"pip install torch=={PAIR[0]} torch-npu=={PAIR[1]} "
    "--extra-index-url https://download.pytorch.org/whl/cpu"
)


def platform_fault() -> str | None:
    """Why the machine cannot run on this platform, None if it can."""
    if sys.platform != "linux":
        return f"the emulated machine needs Linux, as torch_npu does; this is {platform.system()}"
    if platform.machine() not in ("x86_64", "aarch64"):
        return (
            "the emulated machine needs x86-64 or aarch64, as torch_npu does; "
            f"this is {platform.machine()}"
        )
    if platform.libc_ver()[0] != "glibc":
        return "the emulated machine needs glibc, as torch_npu does"
    return None


def missing_libraries() -> list[str]:
    """The machine's libraries that were not built."""
    return [name for name in LIBRARIES if not (HOME / name).exists()]


def build_fault() -> str | None:
    """Why the libraries cannot be loaded, None if they are all there."""
    missing = missing_libraries()
    if not missing:
        return None
    return (
        f"{missing[0]} was not built in {HOME}; install kvcore with a C compiler on Linux: "
        "pip install ."
    )


@dataclass(frozen=True, slots=True)
class Wheels:
    """Versions of torch and torch_npu as installed, without importing them; None: not installed.

    wanted: the version of torch that torch_npu asks for, "" if it names none.
    build:  what torch was built for: "cpu", "cu126", ...
    """

    torch: str | None
    torch_npu: str | None
    wanted: str
    build: str

    def fault(self) -> str | None:
        """Why torch_npu cannot be loaded with this torch, with the way out; None if it can."""
        if self.torch_npu is None:
            return f"torch_npu is not installed in {sys.prefix}; {INSTALL}"
        if self.torch is None:
            return f"torch is not installed in {sys.prefix}; {INSTALL}"
        if self.wanted and _release(self.torch) != _release(self.wanted):
            return (
                f"torch_npu {self.torch_npu} needs torch {self.wanted}, and torch {self.torch} is "
                f"installed; pip install torch=={self.wanted} "
                "--index-url https://download.pytorch.org/whl/cpu"
            )
        if self.build != "cpu":
            return (
                f"torch {self.torch} was built for {self.build}, and torch_npu works only beside a "
                f"torch that knows no other accelerator; pip install torch=={_release(self.torch)} "
                "--index-url https://download.pytorch.org/whl/cpu"
            )
        return None


def _release(version: str) -> str:
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else version


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _wanted_torch() -> str:
    try:
        needs = distribution("torch_npu").requires or []
    except PackageNotFoundError:
        return ""
    for need in needs:
        found = re.match(r"torch\s*\(?==\s*([\d.]+\d)", need)
        if found:
            return found[1]
    return ""


def _built_for() -> str:
    """Read torch's file of versions: importing torch would load torch_npu."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "cpu"
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return "cpu"
    for name in ("cuda", "hip", "xpu"):
        value = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if value:
            return f"{name} {value[1]}"
    return "cpu"


def facts() -> dict[str, object]:
    """What ``kvcore info`` says of the machine; nothing of it is loaded or imported.

    usable: None, or why the machine cannot start.  The others: libraries that are built, of those
    that it needs, and their folder; the CANN that it stands for; the packages, and the pair of
    them that the tests run against.
    """
    from kvcore.emulator.environment import CHECKS, SOCS, TOOLS

    found = wheels()
    missing = missing_libraries()
    return {
        "usable": platform_fault() or build_fault() or found.fault(),
        "libraries": f"{len(LIBRARIES) - len(missing)} of {len(LIBRARIES)} in {HOME}",
        "missing": [str(name) for name in missing],
        "cann": CANN_VERSION,
        "socs": list(SOCS),
        "checks": list(CHECKS),
        "tools": list(TOOLS),
        "torch": found.torch,
        "torch_npu": found.torch_npu,
        "tested": f"torch {PAIR[0]} with torch_npu {PAIR[1]}",
    }


def wheels() -> Wheels:
    """The versions of torch and torch_npu that pip has installed in this environment."""
    return Wheels(_version("torch"), _version("torch_npu"), _wanted_torch(), _built_for())
