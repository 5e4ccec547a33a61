"""What a pool of hosts answers, with simulated actors and with real ones (`python -m support.pool_answers`)."""

import json

from axlearn_core.compat import assign_environment
from axlearn_plugins_runtime.launch.job import Job
from axlearn_plugins_runtime.launch.ray import QUIET
from axlearn_plugins_runtime.launch.ray_pool import RayPool
from axlearn_plugins_runtime.scale.simulated_ray import SimulatedRay

HOSTS = 16
JOB = Job(name="actors", experiment="quickstart", run_dir="s3://nowhere/actors", hosts=14, spares=2)


def events_until(pool, count):
    """Return the hosts with the kinds of their events, after a number of events."""
    events = []
    while len(events) < count:
        events += pool.wait(30.0)
    return sorted([host, event["event"]] for host, event in events)


def follow(ray, pool):
    """Use a pool as the supervisor does, and return what it answers."""
    answers = [events_until(pool, HOSTS)]
    answers.append([[host, ranks] for host, ranks in sorted(pool.ask_all(range(HOSTS), "kill").items())])
    answers.append(pool.ask(3, "coordinator", "127.0.0.1").rpartition(":")[1])
    ray.kill(pool.actors[5])
    answers.append(events_until(pool, 1))
    answers.append(sorted(pool.ask_all(range(HOSTS), "kill")))
    pool.call(5, "kill")  # a lost host is skipped
    pool.revive(5)
    answers.append(events_until(pool, 1))
    return answers


def simulated():
    """Return the answers of simulated actors."""
    ray = SimulatedRay(HOSTS)
    return follow(ray, RayPool(ray, JOB, spread=True, resources={"CPU": 1}, now=ray.clock.now))


def main():
    """Print the answers of real actors on this machine."""
    assign_environment(QUIET)
    import ray

    ray.init(address="local", num_cpus=HOSTS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with RayPool(ray, JOB, spread=False, resources={"CPU": 1}) as pool:
            print(json.dumps(follow(ray, pool)))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
