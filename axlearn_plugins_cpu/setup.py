"""Builds the kernels with the compiler that is here (`CXX`).

Where there is none, the package is installed without them; with AXLEARN_NATIVE=required that is an error.
"""

import os
import sys
from pathlib import Path

import jaxlib
from setuptools import Extension, setup

HEADERS = Path(jaxlib.__path__[0]) / "include"
LINUX = sys.platform == "linux"  # where a wheel brings the C++ library along, to need none of the system
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
    extra_link_args=["-s", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"] if LINUX else [],
    language="c++",
    py_limited_api=True,
    optional=os.environ.get("AXLEARN_NATIVE") != "required",
)  # fmt: skip

setup(ext_modules=[native])
