"""Hook implementations of this plugin. Do not import JAX here."""

from pathlib import Path

from axlearn_core.extend import KernelImplementation, Storage, Weights, hookimpl


@hookimpl
def axlearn_kernels() -> list[KernelImplementation]:
    """Register the `product` kernel.

    The reference has priority 0. A lower priority means that the kernel only runs if a config selects it.
    """
    op = "axlearn_plugins_transformer.kernels.rms_norm:RMSNormOp"
    load = "axlearn_plugins_my_parts.kernel:PRODUCT"
    return [KernelImplementation(name="product", op=op, load=load, priority=-10)]


@hookimpl
def axlearn_checkpoint_storage(uri: str) -> Storage | None:
    """Open `sqlite:///folder/file.db`."""
    if not uri.startswith("sqlite://"):
        return None
    from axlearn_plugins_my_parts.storage import SqliteStorage

    return SqliteStorage(Path(uri.removeprefix("sqlite://")))


@hookimpl
def axlearn_weights(uri: str) -> Weights | None:
    """Open `model.npz`."""
    file = Path(uri).expanduser()
    if file.suffix != ".npz" or not file.is_file():
        return None
    from axlearn_plugins_my_parts.weights import NpzWeights

    return NpzWeights(file)
