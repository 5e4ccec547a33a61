"""The steps of a server on a machine that need not be here: compiled, and what they take of its memory and its time."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import numpy as np

from axlearn_core.compose.devices import topology_devices
from axlearn_core.compose.functions import Array
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Node, find, patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError
from axlearn_core.kernels.selection import Choice
from axlearn_plugins_plan.collectives import collectives
from axlearn_plugins_plan.compilation import compile_function, uncached
from axlearn_plugins_plan.groups import Places, domains_of
from axlearn_plugins_plan.hlo import parse
from axlearn_plugins_plan.memory import shard_bytes
from axlearn_plugins_plan.roofline import Roofline, peak
from axlearn_plugins_serving.runner import ModelRunner, RunnerProgram
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_transformer.kernels.paged_attention import PagedAttentionOp
from axlearn_plugins_transformer.layer_roles import ExpertsRole

LAYERS = "decoder.num_layers"
DEPTHS = (2, 3)
"""Layers that are compiled in the place of many equal ones, whose figures go on in a straight line."""


@attrs.frozen(kw_only=True)
class Compiled:
    """What a compiler says of one step. Bytes are of one device.

    Attributes:
        temporaries: what exists during the step.
        code: the program itself.
        links: sent to devices of the same domain; None where the module does not tell.
        network: sent out of the domain; None where the module does not tell.
        refused: whether the compiler stopped because it does not fit.
    """

    temporaries: float
    code: float
    links: float | None
    network: float | None
    refused: bool = False

    def continued(self, other: "Compiled", steps: int) -> "Compiled":
        """`other`, which is of one layer more, and as much again for each of so many further layers."""
        pairs = {n: (getattr(self, n), getattr(other, n)) for n in ("temporaries", "code", "links", "network")}
        values: dict[str, Any] = {
            n: None if a is None or b is None else max(0.0, b + (b - a) * steps) for n, (a, b) in pairs.items()
        }
        return Compiled(**values, refused=self.refused or other.refused)


@attrs.frozen(kw_only=True)
class StepPlan:
    """One shape of a step.

    Attributes:
        bucket: the shape.
        requests: that decode.
        prompt: tokens of prompts.
        compiled: what the compiler says.
        flops: of all devices.
        traffic: bytes to and from the memory of one device.
        roofline: the least time.
    """

    bucket: StepBucket
    requests: int
    prompt: int
    compiled: Compiled
    flops: float
    traffic: float
    roofline: Roofline


class Steps:
    """The steps of one model on one machine.

    Attributes:
        program: with abstract weights.
        weights: bytes of one device.
        token_bytes: of the cache, of one token on one device.
        tables: bytes of one device, of everything else that outlasts a step.
    """

    def __init__(self, cfg: ModelRunner.Config, model: Node[Any], machine: Machine, mesh: Mesh):
        self.cfg, self.model, self.machine, self.mesh = cfg, model, machine, mesh
        self.devices, self.depths = topology_devices(machine), DEPTHS
        self.blocks, self.program = cfg.total_blocks, self._build(model)
        self.buckets = self.program.buckets
        weights, cache, tables, _ = self.program.arguments("serve", self.buckets[0])
        self.weights, self.tables = shard_bytes(weights), shard_bytes(tables)
        self.token_bytes = shard_bytes(cache) / (self.blocks * cfg.block_size)
        self.dtype = str(np.result_type(*{leaf.dtype for leaf in jax.tree.leaves(cache)}))
        self.shallow = self._shallow()

    @property
    def layers_compiled(self) -> tuple[int, ...] | None:
        """How many layers the compiled programs have; None where it is all of them."""
        return self.depths if self.shallow else None

    def plan(self, bucket: StepBucket, requests: int, prompt: int, context: int) -> StepPlan:
        """Compiles a step.

        Args:
            bucket: its shape.
            requests: that decode in it.
            prompt: tokens of prompts in it.
            context: tokens that each request has in the cache.
        """
        compiled = self._compile(bucket)
        flops, traffic = self._work(bucket, requests, prompt, context)
        target = self.machine.target
        best = peak(target, self.dtype) if target.peak_flops else None
        roofline = Roofline(
            compute=flops / self.machine.devices / best if best else None,
            hbm=_seconds(traffic, target.hbm_bandwidth),
            links=_seconds(compiled.links, target.link_bandwidth),
            network=_seconds(compiled.network, target.network_bandwidth),
        )
        return StepPlan(
            bucket=bucket, requests=requests, prompt=prompt, compiled=compiled, flops=flops, traffic=traffic,
            roofline=roofline,
        )  # fmt: skip

    def choices(self) -> tuple[Choice, ...]:
        """The kernels of the steps that were compiled."""
        return tuple(self._traced_program().choices("serve"))

    def _build(self, model: Node[Any]) -> RunnerProgram:
        with uncached():
            return RunnerProgram.with_steps(self.cfg, model, self.devices, self.mesh, self.machine.target)

    def _shallow(self) -> Sequence[ModelProgram]:
        """The programs of fewer layers, where all layers are alike; empty where all have to be compiled."""
        layers = find(self.model, LAYERS).get(LAYERS)
        if not isinstance(layers, int) or layers <= max(self.depths) + 1:
            return ()
        try:
            programs = [self._build(patch(self.model, {LAYERS: depth})) for depth in self.depths]
        except ConfigError:  # layers that are told apart by their number
            return ()
        first, second = (shard_bytes(p.arguments("serve", self.buckets[0])[:2]) for p in programs)
        whole = shard_bytes(self.program.arguments("serve", self.buckets[0])[:2])
        alike = second + (second - first) * (layers - self.depths[1]) == whole
        return programs if alike else ()

    def _compile(self, bucket: StepBucket) -> Compiled:
        if not self.shallow:
            return self._read(self.program, bucket)
        first, second = (self._read(program, bucket) for program in self.shallow)
        return first.continued(second, find(self.model, LAYERS)[LAYERS] - self.depths[1])

    def _read(self, program: ModelProgram, bucket: StepBucket) -> Compiled:
        compiled, memory = compile_function(program, "serve", bucket, self.machine)
        links = network = None
        if compiled is None:
            return Compiled(temporaries=memory.temporaries, code=memory.code, links=None, network=None, refused=True)
        mesh = program.layout.mesh
        places = Places(dict(mesh.shape), domains_of(list(mesh.devices.flat), self.machine.devices_per_domain))
        try:
            traffic = collectives(parse(compiled.as_text()), places)
            links, network = (sum(c.times * getattr(c, n) for c in traffic) for n in ("link_bytes", "network_bytes"))
        except ValueError:  # a compiler that writes them in a way of its own; all else is still known
            pass
        return Compiled(temporaries=memory.temporaries, code=memory.code, links=links, network=network)

    def _work(self, bucket: StepBucket, requests: int, prompt: int, context: int) -> tuple[float, float]:
        """(FLOPs of all devices, bytes to and from the memory of one) of what requests need of a step."""
        tokens = requests + prompt
        results = requests + -(-prompt // bucket.chunk) if bucket.chunk else requests
        flops = traffic = 0.0
        weights: Mapping[str, Array] = self.program.function("serve").inputs(bucket)[0]
        specs = self.program.arguments("serve", bucket)[0]
        for path, array in weights.items():
            size, rows, share = math.prod(array.shape), tokens, 1.0
            if ".embedding." in f".{path}":  # rows of it are taken
                continue
            if array.axes[-1:] == ("vocab",):
                rows = results
            if "experts" in array.axes:
                count = array.shape[array.axes.index("experts")]
                num_chosen = min(count, self._top_k())
                rows, share = tokens * num_chosen / count, min(1.0, tokens * num_chosen / count)
            if len(array.shape) > 1:
                flops += 2.0 * size * rows
            traffic += share * shard_bytes(specs[path])
        flops += 4.0 * (requests * context + prompt * prompt / 2) * self._query_width()
        return flops, traffic + (requests * context + prompt + tokens) * self.token_bytes  # read, and written

    def _top_k(self) -> int:
        return max((experts.top_k for experts in find(self.model, ExpertsRole).values()), default=1)

    def _query_width(self) -> float:
        """Numbers of all heads of the queries of a token, over all layers."""
        ops = [c.op for c in self.choices() if isinstance(c.op, PagedAttentionOp)]
        layers = find(self.model, LAYERS).get(LAYERS, 1)
        return max((op.query.shape[1] * op.query.shape[2] for op in ops), default=0) * layers

    def _traced_program(self) -> ModelProgram:
        return self.shallow[0] if self.shallow else self.program


def _seconds(size: float | None, bandwidth: float | None) -> float | None:
    if size == 0:
        return 0.0
    return None if size is None or not bandwidth else size / bandwidth
