"""Parallelisms as features and mesh shapes, and their combinations."""

PARALLELISMS = {
    "data": ((), {"data": 2}),
    "fsdp": ((), {"fsdp": 2}),
    "tensor": ((), {"tensor": 2}),
    "sequence": (("sequence-parallel",), {"tensor": 2}),
    "ring": (("context-parallel:method=ring",), {"seq": 2}),
    "all-gather": (("context-parallel:method=all-gather",), {"seq": 2}),
    "all-to-all": (("context-parallel:method=all-to-all",), {"seq": 2}),
    "compiler": ((), {"seq": 2}),
    "experts": (("moe",), {"expert": 2}),
    "experts-sent": (("moe", "expert-parallel"), {"expert": 2}),
    "pipeline": (("pipeline:microbatches=4",), {"pipeline": 2}),
    "interleaved": (("pipeline:microbatches=4,schedule=interleaved",), {"pipeline": 2}),
    "1f1b": (("pipeline:microbatches=4,schedule=1f1b",), {"pipeline": 2}),
}
"""Name -> (features, mesh shape)."""


def together(*names):
    """Return the features and mesh shape of several parallelisms, or None if two of them set a feature differently.

    A shared axis is as large as the product of both.
    """
    features = list(dict.fromkeys(f for n in names for f in PARALLELISMS[n][0]))
    shape = {}
    for name in names:
        for axis, size in PARALLELISMS[name][1].items():
            shape[axis] = shape.get(axis, 1) * size
    kinds = [f.partition(":")[0] for f in features]
    clash = len(kinds) > len(set(kinds)) or ("compiler" in names and "context-parallel" in kinds)
    return None if clash else (features, shape)
