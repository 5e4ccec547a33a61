"""The checkpointer keeps its contract in Orbax's older formats; `tests/conformance` runs the suite with the defaults."""

from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer
from axlearn_testing import CheckpointerSuite


class TestFolders(CheckpointerSuite):
    config = OrbaxCheckpointer.Config(ocdbt=False, zarr3=False, compression=True)
