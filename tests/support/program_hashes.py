"""Hashes of the programs of shipped experiments and features at toy size, without names and locations."""

import hashlib
import re

import jax

from axlearn_core import compose
from axlearn_core.config import patch
from support import toy_models

MESHES = {"fsdp=8": {"fsdp": 8}, "data=2,fsdp=2,tensor=2": {"data": 2, "fsdp": 2, "tensor": 2}}
"""By name; every program is also lowered for one device."""


def cases():
    """Names of programs: an experiment, a feature of quickstart or llama2-7b behind `+`, and a mesh behind `@`."""
    names = [f"{e}@1" for e in toy_models.experiments()]
    names += [f"{e}@{mesh}" for e in ("quickstart", "llama2-7b") for mesh in MESHES]
    names += [f"llama2-7b+{f}@1" for f in toy_models.features() if toy_models.fits("llama2-7b", f)]
    return names


def lowered(case):
    """Function name -> its lowered program."""
    model, _, mesh = case.partition("@")
    experiment, *features = model.split("+")
    config = toy_models.config(experiment, *features)
    if mesh == "1":
        config = patch(config, {"mesh.shape": {}})
    else:
        config = patch(config, {"mesh.shape": MESHES[mesh]})
    program = compose(config, jax.devices()[:1] if mesh == "1" else jax.devices())
    batch = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in toy_models.batch_for(config).items()}
    return {name: program.lower(name, None if name == "init" else batch) for name in ("init", "train", "evaluate")}


def canonical(text):
    """A program's text without what only names things: the module, its functions, arguments and results.

    Values are numbered by MLIR in order. Functions are numbered here in the order in which they appear.
    """
    text = re.sub(r"module @\S+", "module", text)
    text = re.sub(r"jax\.(result_info|arg_info) = \"[^\"]*\"(, )?", "", text).replace(", }", "}").replace(" {}", "")
    numbers: dict[str, str] = {}
    return re.sub(r"@([\w.\"]+)", lambda m: "@" + numbers.setdefault(m[1], str(len(numbers))), text)


def fingerprints(case):
    """Function name -> hash."""
    return {
        name: hashlib.sha256(canonical(program.as_text()).encode()).hexdigest()[:16]
        for name, program in lowered(case).items()
    }
