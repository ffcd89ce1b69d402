# SPDX-License-Identifier: Apache-2.0
"""Compiles the test double of CANN into a folder laid out like an installed CANN.

``build(folder)`` gives an :class:`Installation`; README.md beside this file says how to use it.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "kvcore" / "emulator" / "cann"
RUNTIME = (
    "calls", "device", "memory", "copy", "stream", "event", "callback", "capture", "update",
    "value", "numbers", "platform", "virtual", "hccl", "by_name", "formats", "python", "journal",
    "fault", "stuck",
)  # fmt: skip
OPBASE = ("tensor", "executor")
OPERATORS = ("scatter", "gather", "convert", "nd_update", "pad")
CUSTOM = ("selection",)
FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-pthread",
)
#: What cannot be told from a stub's return code alone.
POINTERS = ("aclGetRecentErrMsg", "aclrtGetSocName", "aclrtCreateStreamConfigHandle")
DEFINITION = re.compile(r"^[a-z][\w ]*[ *](acl\w+)\(", re.MULTILINE)


def why_not() -> str | None:
    """The reason why the double cannot be built here, None if it can."""
    if platform.system() != "Linux":
        return "the test double of CANN needs Linux"
    return None if shutil.which("cc") else "no C compiler (cc)"


@dataclass(frozen=True)
class Installation:
    """Where a double lies.

    home:    what ASCEND_HOME_PATH of an installed CANN names.
    lib:     its ``lib64``, or ``devlib`` of a stub.
    runtime: the library with the runtime's symbols and ``kvdouble_*``.
    opapi:   the library with the built-in operators, None if there is none.
    custom:  ``libcust_opapi.so``, None if there is none.
    """

    home: Path
    lib: Path
    runtime: Path
    opapi: Path | None
    custom: Path | None

    def environment(self) -> dict[str, str]:
        """What ``set_env.sh`` would set."""
        return {
            "ASCEND_HOME_PATH": str(self.home),
            "ASCEND_TOOLKIT_HOME": str(self.home),
            "ASCEND_OPP_PATH": str(self.home / "opp"),
        }


def build(
    folder: Path,
    *,
    soc: str = "Ascend910_9391",
    devices: int = 1,
    umbrella: bool = True,
    split: bool = True,
    missing: tuple[str, ...] = (),
    stub: bool = False,
    custom: bool = True,
    sanitize: str | None = None,
) -> Installation:
    """Compile a double below ``folder``; each set of options is compiled once.

    soc, devices: what the device says it is, and how many there are (0: none).
    umbrella:     libascendcl.so and libopapi.so are there.
    split:        libacl_rt.so and libopapi_transformer.so are there.
    missing:      symbols that this CANN does not export.
    stub:         the libraries of ``devlib``: every call returns 100039.
    custom:       libcust_opapi.so is installed.
    sanitize:     what ``-fsanitize=`` takes.
    """
    name = f"{soc}-{devices}-{umbrella}{split}{stub}{custom}-{'+'.join(missing)}-{sanitize}"
    home = folder / name.replace("/", "_").replace(",", "_")
    lib = home / ("devlib" if stub else "lib64")
    runtime = lib / ("libacl_rt.so" if split else "libascendcl.so")
    names = (["libopapi_transformer.so"] if split else []) + (["libopapi.so"] if umbrella else [])
    vendor = home / "opp" / "vendors" / "customize" / "op_api" / "lib"
    result = Installation(
        home, lib, runtime, lib / names[0] if names else None,
        vendor / "libcust_opapi.so" if custom else None,
    )  # fmt: skip
    if (home / "done").exists():
        return result
    shutil.rmtree(home, ignore_errors=True)
    lib.mkdir(parents=True)
    _Builder(folder, home, lib, missing, sanitize, stub).make(
        soc, devices, umbrella, split, names, vendor if custom else None
    )
    (home / "done").touch()
    return result


class _Builder:
    def __init__(
        self,
        folder: Path,
        home: Path,
        lib: Path,
        missing: tuple[str, ...],
        sanitize: str | None,
        stub: bool,
    ) -> None:
        self.objects = folder / f"objects-{sanitize}".replace(",", "_")
        self.objects.mkdir(exist_ok=True)
        self.home, self.lib, self.stub = home, lib, stub
        self.flags = [*FLAGS, *([f"-fsanitize={sanitize}"] if sanitize else [])]
        self.script = home / "symbols.map"
        hidden = "".join(f"{symbol}; " for symbol in missing)
        self.script.write_text(f"{{ global: *; {f'local: {hidden}' if hidden else ''}}};\n")

    def run(self, *command: str | Path) -> None:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")

    def objects_of(self, parts: tuple[str, ...], library: str) -> list[Path]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda part: self.compile(SOURCES / f"{part}.c", library), parts))

    def compile(self, source: Path, library: str) -> Path:
        out = self.objects / f"{source.stem}-{library}.o"
        if not out.exists():
            self.run(
                "cc", *self.flags, f'-DLIBRARY="{library}"', f"-I{SOURCES}", "-c", source, "-o", out
            )
        return out

    def link(self, out: Path, objects: list[Path], *needs: Path) -> None:
        # Linked by path and without a soname, so that two doubles never take each other's parts.
        self.run(
            *("cc", *self.flags, "-shared", f"-Wl,--version-script={self.script}"),
            *("-Wl,--no-as-needed", "-o", out, *objects, *needs, "-lm"),
        )

    def library(self, out: Path, parts: tuple[str, ...], *needs: Path, tag: str = "") -> None:
        if self.stub:
            self.link(out, [self._stub(out, parts)])
            return
        self.link(out, self.objects_of(parts, tag or "core"), *needs)

    def make(
        self,
        soc: str,
        devices: int,
        umbrella: bool,
        split: bool,
        names: list[str],
        vendor: Path | None,
    ) -> None:
        core = self.lib / "libacl_rt_impl.so"
        if not self.stub:
            settings = self.home / "settings.c"
            settings.write_text(
                '#include "machine.h"\n'
                f'const char *const kvd_built_soc = "{soc}";\n'
                f"const int kvd_built_devices = {devices};\n"
            )
            objects = self.objects_of(RUNTIME, "core")
            built = self.home / "settings.o"
            self.run("cc", *self.flags, f"-I{SOURCES}", "-c", settings, "-o", built)
            self.link(core, [*objects, built])
        fronts = (["libacl_rt.so"] if split else []) + (["libascendcl.so"] if umbrella else [])
        for front in fronts:
            self.library(self.lib / front, RUNTIME if self.stub else (), core)
        base = self.lib / "libnnopbase.so"
        self.library(base, OPBASE, core)
        for name in names:
            self.library(self.lib / name, OPERATORS, base, core, tag=name)
        (self.home / "opp").mkdir()
        if vendor:
            vendor.mkdir(parents=True)
            self.library(vendor / "libcust_opapi.so", CUSTOM, base, core, tag="libcust_opapi.so")
            config = self.home / "opp" / "vendors" / "config.ini"
            config.write_text("load_priority=customize\n")

    def _stub(self, out: Path, parts: tuple[str, ...]) -> Path:
        """Every symbol of those parts, as devlib has it."""
        lines = []
        for part in parts:
            for symbol in DEFINITION.findall((SOURCES / f"{part}.c").read_text()):
                pointer = symbol in POINTERS or symbol.startswith("aclCreate")
                kind, value = ("void *", "0") if pointer else ("int ", "100039")
                lines.append(f"{kind}{symbol}(void) {{ return {value}; }}")
        source = self.home / f"{out.stem}-stub.c"
        source.write_text("\n".join(lines) + "\n")
        built = source.with_suffix(".o")
        self.run("cc", "-fPIC", "-c", source, "-o", built)
        return built
