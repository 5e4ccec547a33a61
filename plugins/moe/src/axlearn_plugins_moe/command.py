"""`axlearn upcycle`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("new_run_dir", type=click.Path(path_type=Path))
@click.option("--with", "with_", multiple=True, metavar="FEATURE[:key=value,...]", help="The features; default: moe.")
@click.option("--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value of the new run's config.")
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint to take; default: the newest.")
def upcycle(run_dir: Path, new_run_dir: Path, with_: Sequence[str], set_: Sequence[str], step: int | None) -> None:
    """Make a run with experts, in NEW_RUN_DIR, of the dense model in RUN_DIR.

    Every expert starts as a copy of the feed-forward layer that it replaces. The new run begins at step 0 with a fresh
    optimizer, and takes the training data from where the old run stopped.
    """
    from axlearn_core.plugins.request import Request
    from axlearn_core.plugins.resolve import resolve
    from axlearn_core.train.api import provenance, saved_config
    from axlearn_core.train.run_dir import RunDir
    from axlearn_core.train.trainer import Trainer

    old = saved_config(run_dir)
    if not isinstance(old, Trainer.Config):
        raise _no_run(run_dir)
    resolved = resolve(Request.of(old, with_=with_ or ("moe",), set=set_)).checked()
    config: Any = resolved.config
    place = RunDir.check(new_run_dir, config, saved_config(new_run_dir), allow_drift=True)
    if place.resumes:
        raise _taken(new_run_dir)
    text = resolved.to_yaml()
    state, extra = _upcycled(old, config, run_dir, step)
    place.write(text, {"upcycled_from": str(run_dir), "provenance": provenance(resolved)})
    checkpointer = config.checkpointer.build(directory=place.checkpoints)
    checkpointer.files = {"config.yaml": text}
    try:
        checkpointer.save(0, state, extra={**extra, "step": 0})
        checkpointer.wait()
    finally:
        checkpointer.close()
    click.echo(f"to train it: axlearn train {new_run_dir}/config.yaml --run-dir {new_run_dir}", err=True)
    click.echo(str(new_run_dir))


def _upcycled(old: Any, config: Any, run_dir: Path, step: int | None) -> tuple[Any, dict[str, Any]]:
    """The state of step 0 of the new run, and what the old checkpoint holds besides its state."""
    import jax

    from axlearn_core.compose import Functional
    from axlearn_core.errors import CheckpointError
    from axlearn_plugins_moe.upcycle import upcycle as made_of

    source, target = Functional.of(old.model), Functional.of(config.model)
    key = jax.random.key(config.seed)
    checkpointer = old.checkpointer.build(directory=run_dir / "checkpoints")
    try:
        found = checkpointer.latest_step() if step is None else step
        if found is None or found not in checkpointer.steps():
            known = ", ".join(map(str, checkpointer.steps())) or "none"
            raise CheckpointError(f"{run_dir} has no checkpoint{f' of step {step}' if step else ''} (there: {known})")
        before, extra = checkpointer.restore(found, jax.eval_shape(old.steps(source).init, key))
    finally:
        checkpointer.close()
    params = made_of(before["params"], source, target, seed=config.seed)
    learner = config.learner.build(max_steps=config.max_steps, axes=target.axes)
    state = jax.eval_shape(config.steps(target).init, key)
    fresh = {"step": jax.numpy.zeros((), jax.numpy.int32), "rng": before["rng"]}
    return {**state, **fresh, "params": params, "learner": learner.init(params)}, extra


def _no_run(path: Path) -> Exception:
    from axlearn_core.errors import CheckpointError

    return CheckpointError(f"{path} is no run directory of a trainer\n    fix: give one that `axlearn train` named")


def _taken(path: Path) -> Exception:
    from axlearn_core.errors import RequestError

    return RequestError(f"{path} holds a run already; nothing was written\n    fix: give another NEW_RUN_DIR")
