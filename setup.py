"""The optional part of the build: the C kernels as a plain shared library beside their Python module.

A missing or failing compiler must not fail the install; it leaves one line that says what is lost. No
-march=native: the library carries its own variants and chooses at run time, and a wheel may move to another machine.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = ("portable.c", "avx512.c", "avx2.c", "zjcpu.c", "pack.c", "pool.c")  # those that take long first
FOLDER = "zjournal/kernels/cpu"
# Contraction would fuse multiply and add where one instruction set can and another cannot.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-g0"]


class BuildKernels(build_ext):
    """Builds what it can: with `optional` set, setuptools installs without the file if it is not there."""

    def build_extension(self, ext: Extension) -> None:
        compile_all = self.compiler.compile

        def beside_each_other(sources: list[str], *rest: object, **options: object) -> list[str]:
            """One compiler for each file: two of them take most of the time."""
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_all([source], *rest, **options), sources)
                return [name for names in made for name in names]

        self.compiler.compile = beside_each_other
        self.mkpath(f"{self.build_temp}/{FOLDER}")  # all of them write there
        try:
            super().build_extension(ext)
        except Exception as error:  # whatever a compiler, or its absence, brings
            print(f"zjournal: the C kernels were not built ({error}); the CPU path will use torch, slowly")


setup(
    ext_modules=[
        Extension(
            "zjournal.kernels.cpu._zjcpu",
            sources=[f"{FOLDER}/{name}" for name in SOURCES],
            depends=[str(path) for path in Path(FOLDER).glob("*.h")],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
