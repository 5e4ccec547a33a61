"""Suites for checkpointers and storage backends."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_core.checkpoint import open_storage
from axlearn_core.config import Node
from axlearn_core.contracts.storage import MARKER, Storage
from axlearn_core.errors import CheckpointError, MissingFileError, StorageError
from axlearn_testing.common import assert_equal, need_devices


class CheckpointerSuite:
    """Tests that every checkpointer must pass.

    Attributes:
        config: Config of the checkpointer, with a policy that keeps at least three checkpoints.
    """

    config: Node[Any]

    def open(self, directory: Path) -> Any:
        """Build a checkpointer that writes to a directory."""
        return self.config.build(directory=directory)

    def state(self, seed: int = 0) -> Any:
        """Return a training state with every kind of leaf."""
        key = jax.random.key(seed)
        return {
            "step": jnp.asarray(seed, jnp.int32),
            "rng": jax.random.key_data(key),
            "params": {"a.weight": jax.random.normal(key, (16, 8)), "b": jnp.ones((3,), jnp.bfloat16) * seed},
            "learner": (jnp.arange(6).reshape(2, 3), {"empty": ()}, [jnp.zeros((), jnp.float32)]),
        }

    def save_steps(self, directory: Path, *steps: int, extra: object = None) -> None:
        """Save checkpoints at some steps. The state of a step is `state(step)`."""
        checkpointer = self.open(directory)
        for step in steps:
            checkpointer.save(step, self.state(step), extra=extra or {"step": step}, metrics={"loss": 1.0 / step})
            checkpointer.wait()
        checkpointer.close()

    def test_restore_returns_saved_state(self, tmp_path: Path) -> None:
        extra = {"data": {"shards": {"0": [1, 2]}, "name": "ü"}, "step": 3, "none": None}
        self.save_steps(tmp_path, 3, extra=extra)
        again = self.open(tmp_path)  # as a different process would
        state, restored_extra = again.restore(3, jax.eval_shape(self.state))
        again.close()
        assert_equal(state, self.state(3), "state")
        assert jax.tree.structure(state) == jax.tree.structure(self.state())
        assert restored_extra == extra

    def test_steps_are_listed_oldest_first(self, tmp_path: Path) -> None:
        empty = self.open(tmp_path)
        assert (empty.steps(), empty.latest_step()) == ([], None)
        empty.close()
        self.save_steps(tmp_path, 2, 10, 9)
        again = self.open(tmp_path)
        assert (again.steps(), again.latest_step()) == ([2, 9, 10], 10)
        again.close()

    def test_state_can_be_donated_after_save(self, tmp_path: Path) -> None:
        checkpointer, state = self.open(tmp_path), self.state(1)
        checkpointer.save(1, state, extra={}, metrics={})
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        checkpointer.wait()
        assert_equal(checkpointer.restore(1, jax.eval_shape(self.state))[0], self.state(1), "state")
        checkpointer.close()

    def test_restore_uses_requested_shardings(self, tmp_path: Path) -> None:
        need_devices(2)
        self.save_steps(tmp_path, 1)
        half = NamedSharding(Mesh(jax.devices()[:2], ("data",)), PartitionSpec("data"))
        like: Any = jax.eval_shape(self.state)
        like["params"]["a.weight"] = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=half)
        checkpointer = self.open(tmp_path)
        state, _ = checkpointer.restore(1, like)
        checkpointer.close()
        assert state["params"]["a.weight"].sharding.is_equivalent_to(half, 2)
        assert_equal(state, self.state(1), "state")

    def test_checkpoint_contains_text_files(self, tmp_path: Path) -> None:
        checkpointer = self.open(tmp_path)
        checkpointer.files = {"config.yaml": "a: 1\n", "made.json": lambda: "{}"}
        checkpointer.save(1, self.state(1), extra={}, metrics={})
        checkpointer.close()  # waits for the save
        for name, text in (("config.yaml", "a: 1\n"), ("made.json", "{}")):
            assert [p.read_text() for p in tmp_path.rglob(name)] == [text], name

    def test_wrong_model_and_missing_step_raise(self, tmp_path: Path) -> None:
        self.save_steps(tmp_path, 1)
        checkpointer = self.open(tmp_path)
        like: Any = jax.eval_shape(self.state)
        for change in (
            {"params": {**like["params"], "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}},
            {"params": {**like["params"], "b": jax.ShapeDtypeStruct((3,), jnp.float32)}},
            {"params": {**like["params"], "c": jax.ShapeDtypeStruct((3,), jnp.float32)}},
            {"params": {"b": like["params"]["b"]}},
        ):
            with pytest.raises(CheckpointError):
                checkpointer.restore(1, {**like, **change})
        with pytest.raises(CheckpointError):
            checkpointer.restore(2, like)
        checkpointer.close()

    def test_restore_detects_damage(self, tmp_path: Path) -> None:
        self.save_steps(tmp_path, 1, 2)
        for file in sorted(p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size):
            original = file.read_bytes()
            file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
            checkpointer = self.open(tmp_path)
            damaged = [s for s in checkpointer.steps() if not self._restores(checkpointer, s)]
            checkpointer.close()
            file.write_bytes(original)
            assert len(damaged) == 1, f"flipped one bit of {file.relative_to(tmp_path)}: refused steps {damaged}"

    def _restores(self, checkpointer: Any, step: int) -> bool:
        try:
            checkpointer.restore(step, jax.eval_shape(self.state))
        except CheckpointError:
            return False
        return True

    def test_due_depends_only_on_step(self, tmp_path: Path) -> None:
        one, two = self.open(tmp_path / "a"), self.open(tmp_path / "b")
        due = [one.due(s) for s in range(1, 2000)]
        assert all(type(d) is bool for d in due)
        assert due == [two.due(s) for s in range(1, 2000)], "processes must agree on when a save is due"
        one.close()
        two.close()


class StorageSuite:
    """Tests that every storage backend must pass; see `axlearn_core.contracts.storage.Storage`.

    Attributes:
        uri: URI of the storage. `{tmp}` is replaced with a directory for the test, which is empty or missing at first.
        unwritable: URI that cannot be written to, if there is one. It is below `{tmp}/file`, which is a file.
    """

    uri: str
    unwritable: str | None = None

    def storage(self, uri: str) -> Storage:
        """Open the storage of a URI. The default uses the backends of the core and of installed plugins."""
        return open_storage(uri)

    def open(self, tmp_path: Path) -> Storage:
        """Open the storage of `uri`, as a different process would."""
        return self.storage(self.uri.format(tmp=tmp_path))

    def test_an_empty_storage_has_no_files(self, tmp_path: Path) -> None:
        assert list(self.open(tmp_path).list()) == []
        assert list(self.open(tmp_path).list("a/")) == []
        with pytest.raises(MissingFileError):
            self.open(tmp_path).read("a/b")

    def test_read_returns_written_bytes(self, tmp_path: Path) -> None:
        chunks = [b"0123", memoryview(b"456789"), b""]
        self.open(tmp_path).write("a/b.bin", chunks)
        again = self.open(tmp_path)
        assert again.read("a/b.bin") == b"0123456789"
        again.write("a/b.bin", [b"x"])
        assert self.open(tmp_path).read("a/b.bin") == b"x", "a later write replaces an earlier one"

    def test_read_range_into_buffer(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        storage.write("a", [bytes(range(256)) * 1024])
        for begin, size in ((0, 0), (0, 1), (255, 3), (1000, 200_000), (256 * 1024 - 5, 5)):
            buffer = bytearray(size)
            storage.read_into("a", begin, memoryview(buffer))
            assert buffer == (bytes(range(256)) * 1024)[begin : begin + size], (begin, size)

    def test_truncated_file_raises(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        storage.write("a", [b"0123"])
        for begin in (2, 4, 9):
            with pytest.raises(StorageError):
                storage.read_into("a", begin, memoryview(bytearray(3)))
        with pytest.raises(MissingFileError):
            storage.read_into("b", 0, memoryview(bytearray(1)))

    def test_list_returns_sizes_by_prefix(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        for path in ("b/2", "a", "b/1/x", "b/10"):
            storage.write(path, [path.encode()])
        sizes = {f.path: f.bytes for f in self.open(tmp_path).list()}
        assert sizes == {"a": 1, "b/1/x": 5, "b/10": 4, "b/2": 3}
        assert [f.path for f in storage.list()] == sorted(sizes)
        assert [f.path for f in storage.list("b/")] == ["b/1/x", "b/10", "b/2"]
        assert [f.path for f in storage.list("b/1")] == ["b/1/x", "b/10"]

    def test_list_names_is_not_recursive(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        for path in ("b/2", "a", "b/1/x/y", "b/1/z", "b/10", "bc"):
            storage.write(path, [b"1"])
        again = self.open(tmp_path)
        assert list(again.list_names()) == ["a", "b", "bc"]
        assert list(again.list_names("b/")) == ["1", "10", "2"]
        assert list(again.list_names("b/1/")) == ["x", "z"]
        assert list(again.list_names("c/")) == []

    def test_failed_write_keeps_old_file(self, tmp_path: Path) -> None:
        def chunks() -> Iterator[bytes]:
            yield b"half"
            raise KeyboardInterrupt

        storage = self.open(tmp_path)
        storage.write("a", [b"whole"])
        for path in ("a", "b"):
            with pytest.raises(KeyboardInterrupt):
                storage.write(path, chunks())
        assert {f.path: f.bytes for f in self.open(tmp_path).list()} == {"a": 5}
        assert storage.read("a") == b"whole"

    def test_commit_is_atomic(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        for path in ("partial/x", "partial/y/z"):
            storage.write(path, [path.encode()])
        storage.commit("partial", "steps/10")
        assert [f.path for f in self.open(tmp_path).list()] == ["steps/10/x", "steps/10/y/z"]
        assert storage.read("steps/10/y/z") == b"partial/y/z"
        storage.write("other/x", [b"other"])
        with pytest.raises(StorageError):
            storage.commit("other", "steps/10")
        assert storage.read("steps/10/x") == b"partial/x", "a commit to an existing target must change nothing"
        with pytest.raises(MissingFileError):
            storage.commit("nowhere", "steps/20")

    def test_commit_publishes_staged_files(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        for target in ("10", "steps/20"):
            staging = storage.staging(target)
            assert staging == storage.staging(target), "every process writes to the same folder"
            storage.write(f"{staging}/state/x", [b"1"])
            storage.write(f"{staging}/{MARKER}", [b"2"])
            storage.commit(staging, target)
            assert [f.path for f in self.open(tmp_path).list(f"{target}/")] == [
                f"{target}/{MARKER}", f"{target}/state/x"
            ]  # fmt: skip
            with pytest.raises(MissingFileError):
                storage.commit(storage.staging("nothing"), "nothing")

    def test_create_succeeds_in_one_writer(self, tmp_path: Path) -> None:
        storages = [self.open(tmp_path) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(lambda n: storages[n].create("a/lock", str(n).encode()), range(8)))
        assert created.count(True) == 1
        assert storages[0].read("a/lock") == str(created.index(True)).encode()
        storages[0].delete("a/lock")
        assert storages[1].create("a/lock", b"again")

    def test_names_support_any_characters(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        names = ["a [1]/b*?", "ü/%20/&=+ #", "p.q/..r"]
        for name in names:
            storage.write(name, [name.encode()])
        assert [f.path for f in self.open(tmp_path).list()] == sorted(names)
        for name in names:
            assert storage.read(name) == name.encode()
            storage.delete(name)
        assert list(storage.list()) == []

    def test_delete_is_idempotent(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        for path in ("a/x", "a/y/z", "ab", "c"):
            storage.write(path, [b"1"])
        for _ in range(2):
            storage.delete("a")
            storage.delete("c")
        assert [f.path for f in self.open(tmp_path).list()] == ["ab"]

    def test_directory_contains_files(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        storage.write("a/x", [b"1"])
        try:
            directory = storage.directory()
        except StorageError:
            pytest.skip("needs a storage with a local or mounted directory")
        assert (directory / "a" / "x").read_bytes() == b"1"
        (directory / "b").write_bytes(b"22")
        assert {f.path: f.bytes for f in self.open(tmp_path).list()} == {"a/x": 1, "b": 2}

    def test_unwritable_location_raises(self, tmp_path: Path) -> None:
        if self.unwritable is None:
            pytest.skip("needs a URI that cannot be written to: set `unwritable`")
        (tmp_path / "file").touch()
        storage = self.storage(self.unwritable.format(tmp=tmp_path))
        with pytest.raises(StorageError):
            storage.write("a", [b"1"])
