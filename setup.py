# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled modules; everything else is in pyproject.toml.

Switches (environment variables, read at build time):

KVCORE_DEBUG=1     bounds checks on every memoryview index and on every byte range a kernel
                   touches; slow, for tests.
KVCORE_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer (run Python with the
                   sanitizer runtime preloaded; see CONTRIBUTING.md).

No -march flag is ever passed: a wheel runs on any CPU of its platform, and better instruction
sets are chosen when the library is loaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
PACKAGES = ("kvcore/_kernels", "kvcore/_core")


def switch(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        sys.exit(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"


DEBUG = switch("KVCORE_DEBUG")
SANITIZE = switch("KVCORE_SANITIZE")

# The only table of directives; no module or function overrides it.
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": False,
    "nonecheck": False,
    "cdivision": True,
    "embedsignature": True,
}


def extensions() -> list[Extension]:
    define: list[tuple[str, str | None]] = []
    compile_args = ["-O3", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"]
    link_args: list[str] = ["-pthread"]
    compile_args.append("-pthread")
    if DEBUG:
        define.append(("KVCORE_DEBUG", "1"))
        compile_args[0] = "-O1"
    if SANITIZE:
        flags = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g"]
        compile_args += flags
        link_args += flags[:1]
    found = []
    os.chdir(ROOT)  # Cython wants module paths relative to the project
    for package in PACKAGES:
        for source in sorted(Path(package).glob("*.pyx")):
            name = ".".join(source.with_suffix("").parts)
            headers = [str(p) for p in sorted(Path("kvcore/_kernels").glob("*.h"))]
            found.append(
                Extension(
                    name,
                    [str(source)],
                    include_dirs=["kvcore/_kernels"],
                    depends=headers,
                    define_macros=define,
                    extra_compile_args=compile_args,
                    extra_link_args=link_args,
                )
            )
    return found


class BuildExt(build_ext):
    """Says what to install when there is no compiler."""

    def build_extensions(self) -> None:
        from distutils.errors import CompileError, DistutilsExecError  # vendored by setuptools

        if not self.parallel:
            self.parallel = os.cpu_count() or 1
        try:
            super().build_extensions()
        except (CompileError, DistutilsExecError) as error:
            if compiler_missing(self.compiler):
                sys.exit(
                    "kvcore: no working C compiler was found "
                    f"({' '.join(self.compiler.compiler)!r} does not run). Install one and try again: "
                    "'apt-get install gcc libc6-dev python3-dev' (Debian, Ubuntu), "
                    "'dnf install gcc python3-devel' (Fedora, openEuler), "
                    "'xcode-select --install' (macOS)."
                )
            raise error


def compiler_missing(compiler: object) -> bool:
    import subprocess

    command = [*getattr(compiler, "compiler", ["cc"])[:1], "--version"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode != 0
    except OSError:
        return True


def cython_modules() -> list[Extension]:
    from Cython.Build import cythonize

    return cythonize(
        extensions(),
        compiler_directives=DIRECTIVES,
        nthreads=0,
        include_path=["."],
    )


setup(ext_modules=cython_modules(), cmdclass={"build_ext": BuildExt})
