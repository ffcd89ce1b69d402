# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled modules; everything else is in pyproject.toml.

Switches (environment variables, read at build time):

KVCORE_DEBUG=1     bounds checks on every memoryview index and on every byte range a kernel
                   touches; slow, for tests.
KVCORE_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer (run Python with the
                   sanitizer runtime preloaded; see CONTRIBUTING.md); =thread: ThreadSanitizer.

No -march flag is ever passed: a wheel runs on any CPU of its platform, and better instruction
sets are chosen when the library is loaded.

Every set of switches builds in a folder of its own, build/<set>, so that a second build is
incremental and a release build never picks up a debug build's objects.  Cython is needed to
compile only: metadata and source archives are made without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

PACKAGES = (
    "kvcore/_kernels",
    "kvcore/_core",
    "kvcore/runtime",
    "kvcore/runtime/queues",
    "kvcore/runtime/model",
    "kvcore/runtime/watching",
    "kvcore/emulator",
)
# The C libraries of the emulated machine, for Linux: see libraries.toml there.
MACHINE = Path("kvcore/emulator/cann")
INSTALLATION = Path("kvcore/emulator/installation")
# Code that every Cython module needs (memoryviews, function objects) is compiled once, here.
SHARED = "kvcore._cython_shared"


def switch(name: str, *more: str) -> str:
    """What the variable says; empty for off."""
    value = os.environ.get(name, "0")
    *known, last = ("0", "1", *more)
    if value not in ("", *known, last):
        sys.exit(f"{name}: expected {', '.join(known)} or {last}, got {value!r}")
    return "" if value == "0" else value


DEBUG = switch("KVCORE_DEBUG") == "1"
SANITIZE = switch("KVCORE_SANITIZE", "thread")
SUFFIX = {"": "", "1": "-sanitize", "thread": "-thread"}
SANITIZERS = {"1": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
BUILD_BASE = "build/" + ("debug" if DEBUG else "release") + SUFFIX[SANITIZE]

# The only table of directives; no module or function overrides it.
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": False,
    "nonecheck": False,
    "cdivision": True,
    "embedsignature": True,
    # The pickling that Cython writes copies an object without its C fields, or makes one that was
    # never set up. An object of a compiled class is not copied or pickled: that is a TypeError.
    "auto_pickle": False,
}


def extensions() -> list[Extension]:
    compile_args = ["-O1", "-g1"] if DEBUG or SANITIZE else ["-O3", "-g0"]
    # The two exceptions are names that Cython writes and a module need not use.
    compile_args += ["-Wall", "-Wno-unused-function", "-Wno-unused-const-variable"]
    # A fused multiply-add rounds once where two operations round twice: bytes must not depend on
    # the CPU.
    compile_args += ["-fvisibility=hidden", "-pthread", "-ffp-contract=off"]
    link_args = ["-pthread"]
    define: list[tuple[str, str | None]] = [("KVCORE_DEBUG", "1")] if DEBUG else []
    if SANITIZE:
        sanitizers = SANITIZERS[SANITIZE]
        # The first undefined operation ends the process, so that no test run can miss it.
        compile_args += [sanitizers, "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
        link_args.append(sanitizers)
    sources = [source for package in PACKAGES for source in sorted(Path(package).glob("*.pyx"))]
    headers = [str(header) for package in PACKAGES for header in sorted(Path(package).glob("*.h"))]
    named = [(".".join(source.with_suffix("").parts), str(source)) for source in sources]
    if named:
        named.append((SHARED, SHARED.replace(".", "/") + ".c"))
    return [
        Extension(
            name,
            [source],
            include_dirs=["kvcore/_kernels", "kvcore/_core"],
            depends=headers,
            define_macros=define,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
        for name, source in named
    ]


class Build(build):
    """Builds in the folder of this set of switches."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = BUILD_BASE

    def run(self) -> None:
        # Whatever lies there goes into the wheel: leave no module that was since removed.
        if Path(self.build_lib).is_relative_to(BUILD_BASE):
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    """Tries the compiler, translates with Cython, compiles in parallel."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = available_cores()
        if self.inplace:
            # pip gives a temporary folder, and every edit would compile everything again.
            tag = f"{self.plat_name}-{sys.implementation.cache_tag}"
            self.build_temp = f"{BUILD_BASE}/temp.{tag}"
            self.build_lib = f"{BUILD_BASE}/inplace.{tag}"

    def get_source_files(self) -> list[str]:
        # The shared module's C file is generated: it is no source.
        return [name for name in super().get_source_files() if Path(name).exists()]

    def build_extensions(self) -> None:
        check_compiler(self.compiler)
        from Cython.Build import cythonize

        folder = Path(BUILD_BASE, "c")
        # Cython compares times of sources only, and the directives are in none.
        stamp, directives = Path(BUILD_BASE, "directives"), repr(DIRECTIVES)
        stale = not stamp.exists() or stamp.read_text() != directives
        before = {path: (path.read_bytes(), path.stat()) for path in folder.rglob("*.c")}
        translated = cythonize(
            list(self.extensions),
            build_dir=str(folder),
            compiler_directives=DIRECTIVES,
            shared_utility_qualified_name=SHARED,
            include_path=["."],
            nthreads=self.parallel,
            force=self.force or stale,
        )
        # In pip's isolated build Cython itself is new every time, so it translates everything
        # anew.  C that came out the same keeps its time, and is not compiled again.
        for path, (text, status) in before.items():
            if path.read_bytes() == text:
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        for extension, result in zip(self.extensions, translated, strict=True):
            extension.sources = result.sources
            extension.depends = result.depends
        stamp.write_text(directives)
        super().build_extensions()
        self.build_machine()

    def build_machine(self) -> None:
        """Compile the emulated machine's libraries, those whose sources are newer than they."""
        newest = max(path.stat().st_mtime_ns for path in [*MACHINE.iterdir(), Path("setup.py")])
        for made in machine_libraries():
            target = Path(self.build_lib, INSTALLATION, made["file"])
            if self.force or not target.exists() or target.stat().st_mtime_ns < newest:
                self.build_library(target, made)

    def build_library(self, target: Path, made: dict[str, Any]) -> None:
        name = target.name
        objects = self.compiler.compile(
            [str(MACHINE / f"{part}.c") for part in made.get("parts", ())],
            output_dir=str(Path(self.build_temp, name)),
            macros=[("_GNU_SOURCE", None), ("LIBRARY", f'"{name}"')],
            extra_postargs=["-std=c11", "-O2", "-g1", "-Wall", "-Wextra", "-pthread"],
        )
        folder = Path(self.build_lib, INSTALLATION)
        needs = [str(folder / need) for need in made.get("needs", ())]
        # Found beside each other wherever the package lies.
        places = {os.path.relpath(Path(need).parent, target.parent) for need in needs}
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            [*objects, *needs],
            str(target),
            extra_preargs=["-Wl,--no-as-needed", f"-Wl,-soname,{name}"],
            extra_postargs=[
                *("-pthread", "-ldl", "-lm"),
                *(f"-Wl,-rpath,$ORIGIN/{place}" for place in sorted(places)),
            ],
        )

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for made in machine_libraries():
            target = INSTALLATION / made["file"]
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(Path(self.build_lib, target)), str(target), level=self.verbose)

    def get_outputs(self) -> list[str]:
        made = [str(Path(self.build_lib, INSTALLATION, m["file"])) for m in machine_libraries()]
        return super().get_outputs() + made

    def copy_file(self, infile: str, outfile: str, *args: object, **kwargs: object) -> object:
        # An older release build must replace a newer debug build beside the sources.
        force, self.force = self.force, True
        try:
            return super().copy_file(infile, outfile, *args, **kwargs)
        finally:
            self.force = force


def machine_libraries() -> list[dict[str, Any]]:
    """What libraries.toml lists; nothing where the machine cannot run."""
    if sys.platform != "linux":
        return []
    made: list[dict[str, Any]] = tomllib.loads((MACHINE / "libraries.toml").read_text())["library"]
    return made


def available_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


INSTALL = (
    "'apt-get install gcc libc6-dev python3-dev' (Debian, Ubuntu), "
    "'dnf install gcc python3-devel' (Fedora, openEuler), 'xcode-select --install' (macOS)"
)


def check_compiler(compiler: object) -> None:
    """Compile and link an empty module; on failure, end with the sentence that says why."""
    if sys.platform == "win32":
        sys.exit("kvcore: Windows is not supported; use Linux, macOS, or WSL.")
    command = " ".join(getattr(compiler, "compiler_so", ["cc"])[:1])
    with tempfile.TemporaryDirectory() as folder:

        def works(text: str, *, link: bool) -> bool:
            source = Path(folder, "probe.c")
            source.write_text(text)
            library, objects = str(Path(folder, "probe.so")), [str(source.with_suffix(".o"))]
            steps = [[*compiler.compiler_so, "-fPIC", "-c", str(source), "-o", *objects]]
            if link:
                steps.append([*compiler.linker_so, *objects, "-o", library])
            include = [f"-I{path}" for path in compiler.include_dirs]
            try:
                return not any(
                    subprocess.run([*step, *include], capture_output=True, check=False).returncode
                    for step in steps
                )
            except OSError:
                return False

        if not works("#include <stdint.h>\nint kv_probe(void) { return 0; }\n", link=True):
            sys.exit(
                f"kvcore: no working C compiler was found ({command!r} cannot build a small "
                f"library); install one and try again: {INSTALL}."
            )
        if not works("#include <Python.h>\nint kv_probe(void) { return 0; }\n", link=False):
            sys.exit(
                "kvcore: the C compiler works, but Python.h was not found; install the headers "
                f"of Python {sys.version_info.major}.{sys.version_info.minor} and try again: "
                f"{INSTALL}."
            )


os.chdir(Path(__file__).resolve().parent)  # module names are made from relative paths
setup(ext_modules=extensions(), cmdclass={"build": Build, "build_ext": BuildExt})
