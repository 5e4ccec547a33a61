"""Build the C++ kernels with the local compiler (`CXX`).

If the build fails, the package is installed without them. Set AXLEARN_NATIVE=required to make a failed build an error.
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
        # The parts of -ffast-math that do not change finite results and do not affect code outside these files.
        "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    ],
    extra_link_args=["-s"],
    language="c++",
    py_limited_api=True,
    optional=os.environ.get("AXLEARN_NATIVE") != "required",
)  # fmt: skip


class CleanBuild(build_ext):
    """Build command that first removes stale libraries."""

    def build_extension(self, ext: Extension) -> None:
        """Delete libraries from earlier builds, so that a failed build leaves no library behind, and then build."""
        places = [Path(self.get_ext_fullpath(ext.name))]
        if self.editable_mode:
            places.append(Path("src", self.get_ext_filename(ext.name)))
        for path in places:
            path.unlink(missing_ok=True)
        super().build_extension(ext)


setup(ext_modules=[native], cmdclass={"build_ext": CleanBuild})
