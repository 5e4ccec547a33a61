"""The checkpointer keeps the contract of every checkpointer, in each format that Orbax has."""

from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer
from axlearn_testing import CheckpointerSuite


class TestOrbax(CheckpointerSuite):
    config = OrbaxCheckpointer.Config()


class TestFolders(CheckpointerSuite):
    config = OrbaxCheckpointer.Config(ocdbt=False, zarr3=False, compression=True)
