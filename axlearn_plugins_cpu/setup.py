"""Builds the kernels with the compiler that is here (`CXX`).

Where they cannot be built, the package is installed without them; with AXLEARN_NATIVE=required that is an error.
"""

import os
from pathlib import Path

import jaxlib
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HEADERS = Path(jaxlib.__path__[0]) / "include"
SOURCES = Path("src/axlearn_plugins_cpu/native")

native = Extension(
    "axlearn_plugins_cpu._native",
    sources=sorted(map(str, SOURCES.glob("*.cc"))),
    depends=sorted(map(str, SOURCES.glob("*.h"))),
    extra_compile_args=[
        "-isystem", str(HEADERS), "-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wno-psabi",
        # Of what -ffast-math means only what changes no result that is a number, and nothing outside of these files.
        "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    ],
    extra_link_args=["-s"],
    language="c++",
    py_limited_api=True,
    optional=os.environ.get("AXLEARN_NATIVE") != "required",
)  # fmt: skip


class Anew(build_ext):
    """Leaves no library of older sources where this build fails."""

    def build_extension(self, ext: Extension) -> None:
        """Removes what an earlier build made, here and beside the sources, then builds."""
        places = [Path(self.get_ext_fullpath(ext.name))]
        if self.editable_mode:
            places.append(Path("src", self.get_ext_filename(ext.name)))
        for path in places:
            path.unlink(missing_ok=True)
        super().build_extension(ext)


setup(ext_modules=[native], cmdclass={"build_ext": Anew})
