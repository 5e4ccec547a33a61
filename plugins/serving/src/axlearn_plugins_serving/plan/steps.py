"""Compile a server's steps for any machine, and derive their memory and time.

The machine need not be present.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import jax
import numpy as np

from axlearn_core.compose.devices import topology_devices
from axlearn_core.compose.functions import Array
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Node, find, patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.kernels.selection import Choice
from axlearn_plugins_plan.collectives import collectives
from axlearn_plugins_plan.compilation import compile_function, disable_compilation_cache
from axlearn_plugins_plan.groups import Places, find_domains
from axlearn_plugins_plan.hlo import parse
from axlearn_plugins_plan.memory import shard_bytes
from axlearn_plugins_plan.roofline import Roofline, peak
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_serving.runner_program import RunnerProgram
from axlearn_plugins_serving.step_inputs import StepBucket
from axlearn_plugins_transformer.alternate import layer_configs
from axlearn_plugins_transformer.layer_roles import ExpertsRole

LAYERS, LAYER = "decoder.num_layers", "decoder.layer"
DEPTHS = (2, 3)
"""Numbers of layers to compile if a model has many identical layers. The whole model's figures are extrapolated linearly."""


@runtime_checkable
class MixesTokens(Protocol):
    """An op whose work depends on the number of a request's tokens, such as attention or a recurrence."""

    def request_flops(self, new: int, cached: int) -> float:
        """Return the FLOPs for one request with `new` tokens after `cached` ones."""
        ...


@attrs.frozen
class Pages:
    """The keys and values, or the like, of one layer.

    Attributes:
        token_bytes: Bytes per token and device.
        window: Number of tokens, including the current one, that the layer reads; None if it reads all of them.
    """

    token_bytes: float
    window: int | None

    def read(self, cached: int) -> float:
        """Return the bytes that a decoding request with `cached` tokens reads."""
        return self.token_bytes * (cached if self.window is None else min(cached, self.window - 1))


@attrs.frozen(kw_only=True)
class CompiledStep:
    """The compiler's figures for a step. Bytes are per device.

    Attributes:
        temporaries: Bytes of temporaries.
        code: Bytes of the program itself.
        links: Bytes sent to devices in the same domain; None if unknown.
        network: Bytes sent out of the domain; None if unknown.
        out_of_memory: Whether the compiler ran out of memory.
    """

    temporaries: float
    code: float
    links: float | None
    network: float | None
    out_of_memory: bool = False

    def extrapolate(self, other: "CompiledStep", steps: int) -> "CompiledStep":
        """Extrapolate to `steps` more layers than `other`.

        `other` has one more layer than this step.
        """
        pairs = {n: (getattr(self, n), getattr(other, n)) for n in ("temporaries", "code", "links", "network")}
        values: dict[str, Any] = {
            n: None if a is None or b is None else max(0.0, b + (b - a) * steps) for n, (a, b) in pairs.items()
        }
        return CompiledStep(**values, out_of_memory=self.out_of_memory or other.out_of_memory)


@attrs.frozen(kw_only=True)
class StepPlan:
    """The plan of a step with a given shape.

    Attributes:
        bucket: Shape of the step.
        requests: Number of decoding requests.
        prompt: Number of prompt tokens.
        compiled: The compiler's figures.
        flops: Total FLOPs across all devices.
        traffic: Bytes read from and written to the memory of one device.
        roofline: Shortest possible time.
    """

    bucket: StepBucket
    requests: int
    prompt: int
    compiled: CompiledStep
    flops: float
    traffic: float
    roofline: Roofline


class Steps:
    """The steps of a model on a machine.

    Attributes:
        program: Program with abstract weights.
        weights: Bytes of the weights per device.
        pages: Caches of tokens, by layer.
        token_bytes: Bytes of the cache per token and device.
        states: Bytes per device of all recurrent states, including the saved ones.
        state_bytes: Bytes of a request's recurrent states per device.
        tables: Bytes per device of everything else that outlives a step.
    """

    def __init__(self, cfg: ModelRunner.Config, model: Node[Any], machine: Machine, mesh: Mesh):
        self.cfg, self.model, self.machine, self.mesh = cfg, model, machine, mesh
        self.devices, self.depths = topology_devices(machine), DEPTHS
        self.blocks, self.program = cfg.total_blocks, self._build(model)
        self.buckets = self.program.buckets
        weights, cache, tables, *_ = self.program.arguments("serve", self.buckets[0])
        self.weights, self.tables = shard_bytes(weights), shard_bytes(tables)
        entries = list(zip(jax.tree.leaves(self.program.cache_spec), jax.tree.leaves(cache), strict=True))
        capacity = self.blocks * cfg.block_size
        self.pages = [Pages(shard_bytes(x) / capacity, entry.window) for entry, x in entries if entry.per == "page"]
        self.token_bytes = sum(layer.token_bytes for layer in self.pages)
        states = [x for entry, x in entries if entry.per == "request"]
        self.states = shard_bytes(states)
        self.state_bytes = sum(shard_bytes(x) / x.shape[0] for x in states)
        self.dtype = str(np.result_type(*{leaf.dtype for leaf in jax.tree.leaves(cache)}))
        self.shallow = self._build_shallow()
        self._ops: Counter[MixesTokens] | None = None

    @property
    def layers_compiled(self) -> tuple[int, ...] | None:
        """Numbers of layers in the compiled programs; None if all layers were compiled."""
        return self.depths if self.shallow else None

    def plan(self, bucket: StepBucket, requests: int, prompt: int, context: int) -> StepPlan:
        """Compile a step and derive its figures.

        Args:
            bucket: Shape of the step.
            requests: Number of decoding requests.
            prompt: Number of prompt tokens.
            context: Number of cached tokens per request.
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
        """Return the kernels of the compiled steps."""
        return tuple(self._traced_program().choices("serve"))

    def _build(self, model: Node[Any]) -> RunnerProgram:
        with disable_compilation_cache():
            return RunnerProgram.with_steps(self.cfg, model, self.devices, self.mesh, self.machine.target)

    def _build_shallow(self) -> Sequence[ModelProgram]:
        """Return programs with fewer layers if all layers are identical.

        Returns an empty sequence if all layers must be compiled.
        """
        layers = find(self.model, LAYERS).get(LAYERS)
        if not isinstance(layers, int) or layers <= max(self.depths) + 1:
            return ()
        try:
            programs = [self._build(patch(self.model, {LAYERS: depth})) for depth in self.depths]
        except ConfigError:  # layers may depend on their index
            return ()
        first, second = (shard_bytes(p.arguments("serve", self.buckets[0])[:2]) for p in programs)
        whole = shard_bytes(self.program.arguments("serve", self.buckets[0])[:2])
        alike = second + (second - first) * (layers - self.depths[1]) == whole
        return programs if alike else ()

    def _compile(self, bucket: StepBucket) -> CompiledStep:
        if not self.shallow:
            return self._read(self.program, bucket)
        first, second = (self._read(program, bucket) for program in self.shallow)
        return first.extrapolate(second, find(self.model, LAYERS)[LAYERS] - self.depths[1])

    def _read(self, program: ModelProgram, bucket: StepBucket) -> CompiledStep:
        compiled, memory = compile_function(program, "serve", bucket, self.machine)
        links = network = None
        if compiled is None:
            return CompiledStep(
                temporaries=memory.temporaries, code=memory.code, links=None, network=None, out_of_memory=True
            )
        mesh = program.layout.mesh
        places = Places(dict(mesh.shape), find_domains(list(mesh.devices.flat), self.machine.devices_per_domain))
        try:
            traffic = collectives(parse(compiled.as_text()), places)
            links, network = (sum(c.times * getattr(c, n) for c in traffic) for n in ("link_bytes", "network_bytes"))
        except ValueError:  # the compiler's format for collectives is unknown; all other figures are valid
            pass
        return CompiledStep(temporaries=memory.temporaries, code=memory.code, links=links, network=network)

    def _work(self, bucket: StepBucket, requests: int, prompt: int, context: int) -> tuple[float, float]:
        """Return the FLOPs and the memory traffic of a step.

        FLOPs are summed across all devices. Traffic is in bytes, for one device.
        """
        tokens = requests + prompt
        results = requests + -(-prompt // bucket.chunk) if bucket.chunk else requests
        flops = traffic = 0.0
        weights: Mapping[str, Array] = self.program.function("serve").inputs(bucket)[0]
        specs = self.program.arguments("serve", bucket)[0]
        for path, array in weights.items():
            size, rows, share = math.prod(array.shape), tokens, 1.0
            if ".embedding." in f".{path}":  # only some of the rows are read
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
        for op, count in self._mixing_ops().items():
            flops += count * (requests * op.request_flops(1, context) + op.request_flops(prompt, 0))
        traffic += requests * sum(layer.read(context) for layer in self.pages) + prompt * self.token_bytes  # reads
        traffic += tokens * self.token_bytes  # writes
        return flops, traffic + 2 * (requests + bool(prompt)) * self.state_bytes

    def _top_k(self) -> int:
        return max((experts.top_k for experts in find(self.model, ExpertsRole).values()), default=1)

    def _mixing_ops(self) -> Mapping[MixesTokens, int]:
        """Return the ops that mix tokens, and the number of layers that run each."""
        if self._ops is None:
            layers, layer = find(self.model, LAYERS).get(LAYERS, 1), find(self.model, LAYER).get(LAYER)
            kinds = Counter(layer_configs(layer, layers) if isinstance(layer, Node) else ())
            self._ops = Counter()
            try:
                for kind, count in kinds.items():
                    self._ops.update(dict.fromkeys(self._trace_ops(patch(self.model, {LAYERS: 1, LAYER: kind})), count))
            except RequestError:  # a kind that uses values of other layers cannot run alone
                kinds.clear()
            if not kinds:  # an upper bound: each layer runs the op with the most work
                ops = sorted(self._trace_ops(self.model), key=lambda op: op.request_flops(1, self.cfg.max_context))
                self._ops = Counter(dict.fromkeys(ops[-1:], layers))
        return self._ops

    def _trace_ops(self, model: Node[Any]) -> set[MixesTokens]:
        """Return the ops that mix tokens in a decoding step of a model."""
        program = self._build(model)
        program.trace("serve", next(bucket for bucket in program.buckets if not bucket.chunks))
        return {choice.op for choice in program.choices("serve") if isinstance(choice.op, MixesTokens)}

    def _traced_program(self) -> ModelProgram:
        return self.shallow[0] if self.shallow else self.program


def _seconds(size: float | None, bandwidth: float | None) -> float | None:
    if size == 0:
        return 0.0
    return None if size is None or not bandwidth else size / bandwidth
