"""The optional part of the build: the C kernels as a plain shared library beside their Python module.

A missing or failing compiler must not fail the install; it leaves one line that says what is lost. No
-march=native: the library carries its own variants and chooses at run time, and a wheel may move to another machine.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = ("zjcpu.c", "pack.c", "pool.c", "avx512.c", "avx2.c", "portable.c")
FOLDER = "zjournal/kernels/cpu"
# Contraction would fuse multiply and add where one instruction set can and another cannot.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-g0"]


class BuildKernels(build_ext):
    """Builds what it can: with `optional` set, setuptools installs without the file if it is not there."""

    def build_extension(self, ext: Extension) -> None:
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
