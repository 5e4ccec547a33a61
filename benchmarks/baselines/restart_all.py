"""The frozen baseline of restarts: a hand-written `jax.distributed` loop that restarts completely when a process dies.

    python restart_all.py --processes 4 --steps 1000 --dir /tmp/run          # the launcher
    python restart_all.py --rank K ...                                      # started by the launcher

The launcher polls its processes every 50 ms. If one is dead, it kills the others and starts all of them again. They
join a new coordinator, restore the newest Orbax checkpoint, compile, and continue. Each process appends `time step` to
`DIR/steps-RANK` after each step. The launcher appends `time event` to `DIR/events`. The model is the one in
`handwritten_llama.py`, sharded over the processes.
"""
import argparse, os, socket, subprocess, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def worker(a):
    import jax
    jax.distributed.initialize(a.coordinator, a.processes, a.rank)
    import numpy as np, orbax.checkpoint as ocp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from handwritten_llama import Dims, build
    mesh = jax.make_mesh((a.processes, 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    dims = Dims(a.layers, a.width, a.heads, a.heads, a.hidden, a.vocab)
    step, state, batch, init = build(dims, a.batch, a.seq, stack="unrolled", mesh=mesh)
    manager = ocp.CheckpointManager(Path(a.dir) / "checkpoints", options=ocp.CheckpointManagerOptions(save_interval_steps=a.every, max_to_keep=3))
    latest = manager.latest_step()
    if latest is None:
        shardings = jax.tree.map(lambda s: s.sharding, state)
        number, (params, opt_state) = 0, jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    else:
        number, (params, opt_state) = latest, manager.restore(latest, args=ocp.args.StandardRestore(state))
    run = jax.jit(step, donate_argnums=(0, 1))
    rows = a.batch // a.processes
    with open(Path(a.dir) / f"steps-{a.rank}", "a") as log:
        while number < a.steps:
            tokens = np.random.default_rng(number).integers(0, a.vocab, (a.batch, a.seq), np.int32)
            mine = tokens[a.rank * rows:(a.rank + 1) * rows]
            tokens = jax.make_array_from_process_local_data(batch.sharding, mine, (a.batch, a.seq))
            params, opt_state, loss = run(params, opt_state, tokens)
            float(loss)
            number += 1
            log.write(f"{time.time()} {number}\n"); log.flush()
            manager.save(number, args=ocp.args.StandardSave((params, opt_state)))
    manager.wait_until_finished()


def launcher(a):
    Path(a.dir).mkdir(parents=True, exist_ok=True)
    events = open(Path(a.dir) / "events", "a")
    def say(text):
        events.write(f"{time.time()} {text}\n"); events.flush()
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0)); address = f"127.0.0.1:{free.getsockname()[1]}"
        log = open(Path(a.dir) / "log", "a")
        processes = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--coordinator", address, "--rank", str(rank)], stdout=log, stderr=log)
                     for rank in range(a.processes)]
        say("started " + " ".join(str(p.pid) for p in processes))
        while all(p.poll() is None for p in processes):
            time.sleep(0.05)
        if any(p.returncode for p in processes if p.poll() is not None):
            say("dead")
            for p in processes:
                p.kill()
            for p in processes:
                p.wait()
            continue
        for p in processes:
            p.wait()
        return


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True); a.add_argument("--processes", type=int, default=4); a.add_argument("--steps", type=int, default=1000)
    a.add_argument("--layers", type=int, default=4); a.add_argument("--width", type=int, default=128); a.add_argument("--heads", type=int, default=4)
    a.add_argument("--hidden", type=int, default=384); a.add_argument("--vocab", type=int, default=2048); a.add_argument("--batch", type=int, default=8)
    a.add_argument("--seq", type=int, default=64); a.add_argument("--every", type=int, default=5)
    a.add_argument("--coordinator"); a.add_argument("--rank", type=int)
    a = a.parse_args()
    launcher(a) if a.rank is None else worker(a)


if __name__ == "__main__":
    main()
