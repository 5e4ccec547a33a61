"""Image inputs: arrays from files, or shapes that are drawn on demand."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from axlearn_core.config import REQUIRED, Configurable, interface, node, setting
from axlearn_core.errors import ConfigError, InputError, Problem, counted
from axlearn_plugins_transformer.text.cycle import Cycle, Permutations
from axlearn_plugins_transformer.text.positions import OLD_ORDER, ORDER, is_current
from axlearn_plugins_transformer.text.small_data import print_note

T_co = TypeVar("T_co", covariant=True)

Rows = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Row numbers, int64 [n] -> (images float32 [n, E, E, C] around zero, labels int32 [n])."""


class ImageBatches:
    """A `BatchIterator` over this process's rows. `order` returns the row numbers of a batch; the state is the number of
    batches.

    Batches have `images` float32 [B, E, E, C], `labels` int32 [B], and `weights` float32 [B].
    """

    def __init__(
        self,
        rows: Rows,
        order: Callable[[int], np.ndarray],
        rows_slice: slice,
        count: int | None = None,
        old_order: Callable[[int], np.ndarray] | None = None,
    ):
        self._rows, self._order, self._mine, self._count, self._batch_number = rows, order, rows_slice, count, 0
        self._old_order, self._current = old_order, True

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Return the next batch. Row numbers below 0 are padding."""
        if self._batch_number == self._count:
            raise StopIteration
        order = self._old_order if self._old_order and not self._current else self._order
        numbers = order(self._batch_number)[self._mine]
        images, labels = self._rows(np.maximum(numbers, 0))
        self._batch_number += 1
        return {"images": images, "labels": labels, "weights": (numbers >= 0).astype(np.float32)}

    def get_state(self) -> dict[str, int]:
        """Return the position after the last batch."""
        return {"batches": self._batch_number, **({"order": ORDER} if self._current else {})}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue at a position from `get_state`."""
        self._batch_number, self._current = state["batches"], is_current(state)
        if self._old_order and not self._current and self._mine.start == 0:
            print_note(OLD_ORDER)

    def close(self) -> None:
        """Do nothing."""


class Images(Configurable):
    """Base class for image inputs: endless training batches, and one pass over held-out images."""

    @node
    class Config(Configurable.Config[T_co]):
        """`batch_size` is the total number of images across all processes."""

        batch_size: int = setting(default=REQUIRED, ge=1, le=2**24)
        # Edge length E in pixels; None uses the size of the data.
        image_size: int | None = setting(default=None, ge=1, kind="execution", hide_default=True)
        seed: int = interface(default=0)
        process_index: int = interface(default=0)
        process_count: int = interface(default=1)

        def batch_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
            """Return name -> (shape, dtype) for a global batch of color images, or an empty dict without `image_size`."""
            if self.image_size is None:
                return {}
            rows = (self.batch_size,)
            images = (*rows, self.image_size, self.image_size, 3)
            return {"images": (images, "float32"), "labels": (rows, "int32"), "weights": (rows, "float32")}

    def __init__(self, cfg: Any):
        self.cfg = cfg
        rows, remainder = divmod(cfg.batch_size, cfg.process_count)
        if remainder:
            raise ConfigError(
                Problem(
                    path="input.batch_size",
                    message="is not a multiple of the number of processes",
                    got=f"{cfg.batch_size} over {cfg.process_count}",
                    fix=f"set it to a multiple of {cfg.process_count}",
                )
            )
        self._mine = slice(cfg.process_index * rows, (cfg.process_index + 1) * rows)

    def _held_out(self, rows: Rows, count: int) -> ImageBatches:
        size = self.cfg.batch_size

        def order(batch: int) -> np.ndarray:
            numbers = np.arange(batch * size, (batch + 1) * size)
            return np.where(numbers < count, numbers, -1)

        return ImageBatches(rows, order, self._mine, -(-count // size))


SHAPES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disc": lambda y, x: y**2 + x**2 < 0.8,
    "square": lambda y, x: np.maximum(abs(y), abs(x)) < 0.75,
    "ring": lambda y, x: abs(y**2 + x**2 - 0.7) < 0.3,
    "cross": lambda y, x: (np.minimum(abs(y), abs(x)) < 0.25) & (np.maximum(abs(y), abs(x)) < 0.95),
}
"""Name -> function that tests which points, relative to the center, are inside; the radius is 1."""


class DrawnShapes(Images):
    """Images of one shape each, with a random position, size and color, on a noise background.

    New images are drawn at every step.

    The labels are 0 disc, 1 square, 2 ring, 3 cross. An image depends only on the seed and its number. Held-out images are
    the same for all seeds.
    """

    @node
    class Config(Images.Config["DrawnShapes"]):
        """`noise` is a standard deviation (colors are 0.5 to 1); `held_out` is the number of images for evaluation."""

        image_size: int = setting(default=REQUIRED, ge=8)
        noise: float = setting(default=0.3, ge=0)
        held_out: int = setting(default=256, ge=1)

    def __init__(self, cfg: Config, num_classes: int | None = None):
        super().__init__(cfg)
        if num_classes is not None and num_classes < len(SHAPES):
            raise ConfigError(
                Problem(
                    path="model.num_classes",
                    message=f"is {num_classes}, less than the {len(SHAPES)} shapes of input",
                    fix=f"set model.num_classes to at least {len(SHAPES)}, or use other images",
                )
            )

    def train(self) -> ImageBatches:
        """Return batches of images that never repeat."""
        size = self.cfg.batch_size
        return ImageBatches(self._draw_rows(self.cfg.seed), lambda i: np.arange(i * size, (i + 1) * size), self._mine)

    def evaluation(self) -> ImageBatches:
        """Return the held-out images."""
        return self._held_out(self._draw_rows(None), self.cfg.held_out)

    def describe(self) -> Mapping[str, Any]:
        """Return the classes and the number of held-out images."""
        return {"classes": list(SHAPES), "held_out": self.cfg.held_out}

    def _draw_rows(self, seed: int | None) -> Rows:
        def rows(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            pairs = [self._draw(np.random.default_rng([0] if seed is None else [1, seed]), int(n)) for n in numbers]
            return np.stack([image for image, _ in pairs]), np.array([label for _, label in pairs], np.int32)

        return rows

    def _draw(self, rng: np.random.Generator, number: int) -> tuple[np.ndarray, int]:
        rng.bit_generator.advance(number << 32)  # type: ignore[attr-defined]  # PCG64 has it, but its base class does not
        edge, label = self.cfg.image_size, int(rng.integers(len(SHAPES)))
        radius = edge * rng.uniform(0.2, 0.4)
        middle = rng.uniform(radius, edge - radius, 2)
        y, x = (np.mgrid[:edge, :edge] + 0.5 - middle[:, None, None]) / radius
        inside = list(SHAPES.values())[label](y, x)[..., None]
        image = inside * rng.uniform(0.5, 1, 3) + rng.normal(0, self.cfg.noise, (edge, edge, 3))
        return image.astype(np.float32), label


class ImageArrays(Images):
    """Images from .npz files (`numpy.savez`): `images` uint8 [n, E, E, C] and `labels` integer [n], reshuffled for each
    pass.

    Values from 0 to 255 are mapped to the range from -1 to 1. A fraction of the images is held out: the last ones in each file.
    """

    @node
    class Config(Images.Config["ImageArrays"]):
        """`paths` are files or glob patterns. All images are kept in memory."""

        paths: str | tuple[str, ...] = REQUIRED
        held_out: float = setting(default=0.05, gt=0, lt=1)

    def __init__(self, cfg: Config, num_classes: int | None = None):
        super().__init__(cfg)
        patterns = (cfg.paths,) if isinstance(cfg.paths, str) else cfg.paths
        self.files = sorted({f for p in patterns for f in _matching_files(p)})
        parts = [_read(f, num_classes) for f in self.files]
        if len({x.shape[1:] for x, _ in parts}) > 1:
            raise InputError(
                f"images of different sizes in {', '.join(map(str, self.files))}\n    fix: resize them to one size"
            )
        shape = parts[0][0].shape[1:]
        if cfg.image_size is not None and shape != (cfg.image_size, cfg.image_size, 3):
            raise InputError(
                f"images of the wrong size in {self.files[0]}\n    got: {' x '.join(map(str, shape))}\n"
                f"    expected: {cfg.image_size} x {cfg.image_size} x 3\n    fix: set the image_size of the input and the model"
            )
        cuts = [max(1, round(len(x) * (1 - cfg.held_out))) for x, _ in parts]
        splits = list(zip(parts, cuts, strict=True))
        self._training = tuple(np.concatenate([part[i][:cut] for part, cut in splits]) for i in (0, 1))
        self._evaluation = tuple(np.concatenate([part[i][cut:] for part, cut in splits]) for i in (0, 1))

    def train(self) -> ImageBatches:
        """Return endless passes over the training images, each in a new order. The images of a batch are distinct."""
        count, size, seed = len(self._training[1]), self.cfg.batch_size, self.cfg.seed
        permutation = Permutations(count, seed)
        order = Cycle(count, size, seed, permutation)
        if count < size and self._mine.start == 0:
            print_note(
                f"the training data has {counted(count, 'image')}, but a batch has {size}: every batch repeats some images\n"
                f"    fix: add data, or set input.batch_size={count}"
            )

        def numbers(number: Callable[[int], int], batch: int) -> np.ndarray:
            return np.array([number(i) for i in range(batch * size, (batch + 1) * size)])

        old_order = functools.partial(numbers, permutation)
        return ImageBatches(_rows(*self._training), functools.partial(numbers, order), self._mine, old_order=old_order)

    def evaluation(self) -> ImageBatches:
        """Return the held-out images. Raise `InputError` if there are none."""
        if not len(self._evaluation[1]):
            raise InputError("no images are held out\n    fix: raise input.held_out, or set evaluators={}")
        return self._held_out(_rows(*self._evaluation), len(self._evaluation[1]))

    def describe(self) -> Mapping[str, Any]:
        """Return the number of files and images, and hashes of the files."""
        facts = "".join(f"{f.name}:{f.stat().st_size};" for f in self.files)
        content = hashlib.sha256()
        for array in (*self._training, *self._evaluation):
            content.update(np.ascontiguousarray(array).data)
        held_out = len(self._evaluation[1])
        return {"files": len(self.files), "images": len(self._training[1]) + held_out, "held_out": held_out,
                "hash": hashlib.sha256(facts.encode()).hexdigest()[:16], "content": content.hexdigest()[:16]}  # fmt: skip


def _matching_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    paths = [path] if path.is_file() else sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []
    if not paths:
        raise InputError(f"no image file matches {pattern}\n    fix: set input.paths")
    return paths


def _read(file: Path, num_classes: int | None) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as data:
            images, labels = data["images"], data["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{file} has no images: {error}\n    expected: an .npz file with `images` uint8 [n, E, E, C] and `labels` [n]"
        ) from None
    if (
        images.dtype != np.uint8
        or images.ndim != 4
        or labels.shape != images.shape[:1]
        or labels.dtype.kind not in "iu"
    ):
        raise InputError(
            f"{file}: arrays with wrong dtypes or shapes\n    got: images {images.dtype}{list(images.shape)}, "
            f"labels {labels.dtype}{list(labels.shape)}\n    expected: images uint8[n, E, E, C], labels integer[n]"
        )
    wrong = labels < 0 if num_classes is None else (labels < 0) | (labels >= num_classes)
    if wrong.any():
        index = int(np.argmax(wrong))
        expected = "at least 0" if num_classes is None else f"0 to {num_classes - 1}, the classes of the model"
        raise InputError(
            f"{file}: labels[{index}] is not a class\n    got: {labels[index]}\n    expected: {expected}\n"
            "    fix: correct the label, or set model.num_classes"
        )
    return images, labels.astype(np.int32)


def _rows(images: np.ndarray, labels: np.ndarray) -> Rows:
    return lambda numbers: (images[numbers].astype(np.float32) / 127.5 - 1, labels[numbers])
