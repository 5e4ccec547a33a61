"""Figures read from the text of optimized modules, in the forms that the compilers write."""
# ruff: noqa: E501

import numpy as np
import pytest

from axlearn_plugins_plan import hlo, traffic
from axlearn_plugins_plan.collectives import bytes_sent, collectives, sum_by_axes
from axlearn_plugins_plan.groups import Places, replica_groups

# A scan over layers as XLA:TPU writes it: no known_trip_count, memory spaces, a sum of pieces, a fused reduce-scatter.
TPU = """\
HloModule jit_step, is_scheduled=true

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[64,128]) -> bf16[16,128] {
  %input = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.9 = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=9, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, use_global_device_ids=true, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %slice.1 = bf16[16,128]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.9, %zero, %zero), dynamic_slice_sizes={16,128}
}

%body (state: (s32[], bf16[64,128], bf16[5,16,128])) -> (s32[], bf16[64,128], bf16[5,16,128]) {
  %state = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}, /*index=2*/bf16[5,16,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %stack = bf16[5,16,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %gathered = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=1, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, use_global_device_ids=true, to_apply=%add
  %piece = bf16[16,128]{1,0:T(8,128)(2,1)S(1)} fusion(%gathered), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %next = (s32[]{:T(128)}, bf16[64,128]{1,0}, bf16[5,16,128]{2,1,0}) tuple(%i, %gathered, %stack)
}

%condition (state.1: (s32[], bf16[64,128], bf16[5,16,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %state.1 = (s32[]{:T(128)}, bf16[64,128]{1,0}, bf16[5,16,128]{2,1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (p0: bf16[64,128], p1: bf16[5,16,128]) -> bf16[64,128] {
  %p0 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[5,16,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %start = s32[] constant(0)
  %init = (s32[], bf16[64,128]{1,0}, bf16[5,16,128]{2,1,0}) tuple(%start, %p0, %p1)
  %loop = (s32[]{:T(128)}, bf16[64,128]{1,0}, bf16[5,16,128]{2,1,0}) while(%init), condition=%condition, body=%body
  ROOT %out = bf16[64,128]{1,0} get-tuple-element(%loop), index=1
}
"""

# The same from XLA:GPU and XLA:CPU: asynchronous starts, iota groups, a loop with its trip count, slices in fusions.
GPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_slice (param_0: f32[10,4,8], param_1: s32[]) -> f32[4,8] {
  %param_0 = f32[10,4,8]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,4,8]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,4,8}
  ROOT %bitcast = f32[4,8]{1,0} bitcast(%cut)
}

%async_scatter (param_2: f32[32,8]) -> f32[8,8] {
  %param_2 = f32[32,8]{1,0} parameter(0)
  ROOT %rs = f32[8,8]{1,0} reduce-scatter(%param_2), channel_id=4, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%plus
}

%plus (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (arg: (s32[], f32[10,4,8])) -> (s32[], f32[10,4,8]) {
  %arg = (s32[], f32[10,4,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %weights = f32[10,4,8]{2,1,0} get-tuple-element(%arg), index=1
  %weight = f32[4,8]{1,0} fusion(%weights, %i), kind=kLoop, calls=%fused_slice
  %ag = (f32[4,8]{1,0}, f32[32,8]{1,0}) all-gather-start(%weight), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  %agd = f32[32,8]{1,0} all-gather-done(%ag)
  %rss = ((f32[32,8]{1,0}), f32[8,8]{1,0}) async-start(%agd), calls=%async_scatter
  %rsd = f32[8,8]{1,0} async-done(%rss)
  ROOT %out = (s32[], f32[10,4,8]{2,1,0}) tuple(%i, %weights)
}

%condition (arg.1: (s32[], f32[10,4,8])) -> pred[] {
  %arg.1 = (s32[], f32[10,4,8]{2,1,0}) parameter(0)
  ROOT %unknown = pred[] custom-call(%arg.1), custom_call_target="x"
}

ENTRY %main (p: f32[10,4,8]) -> f32[10,4,8] {
  %p = f32[10,4,8]{2,1,0} parameter(0)
  %start = s32[] constant(0)
  %init = (s32[], f32[10,4,8]{2,1,0}) tuple(%start, %p)
  %loop = (s32[], f32[10,4,8]{2,1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %tail = f32[10,4,8]{2,1,0} get-tuple-element(%loop), index=1
  ROOT %ring = f32[10,4,8]{2,1,0} collective-permute(%tail), channel_id=2, source_target_pairs={{0,2},{2,4},{4,6},{6,0}}
}
"""


def test_a_tpu_program():
    module = hlo.parse(TPU)
    places = Places({"data": 2, "fsdp": 4}, np.zeros(8, int))
    assert module.unknown_loops() == []
    assert {c.name: n for c, n in module.scheduled_computations()} == {"main": 1, "body": 5, "condition": 5}
    gathered, scattered = collectives(module, places)
    size = 64 * 128 * 2
    assert (gathered.kind, gathered.axes, gathered.size, gathered.times) == ("all-reduce", "fsdp", 4, 5)
    assert gathered.bytes == 5 * 2 * size * 3 / 4
    assert (scattered.kind, scattered.bytes) == ("reduce-scatter", 5 * size * 3 / 4)
    # The sum reads and writes its 16 KiB. The fusion reads them, but its output is on chip.
    assert traffic.hbm_bytes(module) == 5 * 3 * size + 5 * (4 + 1 + 4)  # and the comparison reads its operands


# A transfer to other slices that a TPU program hands to its host, and a computation of another thread before the entry.
SLICES = """\
HloModule jit_step, is_scheduled=true

%on_a_sparse_core (param_0: f32[8]) -> f32[8] {
  ROOT %param_0 = f32[8]{0} parameter(0)
}, execution_thread="sparsecore"

ENTRY %main (p0: bf16[16,8,128]) -> bf16[16,8,128] {
  %p0 = bf16[16,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %after-all = token[] after-all()
  %send = (bf16[16,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) send(%p0, %after-all), channel_id=5, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.31_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %done = token[] send-done(%send), channel_id=5, is_host_transfer=true
  ROOT %out = bf16[16,8,128]{2,1,0:T(8,128)(2,1)} copy(%p0)
}
"""


SENT = 16 * 8 * 128 * 2


LOOPS = """\
HloModule jit_step, is_scheduled=true

%condition (x: s32[]) -> pred[] {
  %x = s32[] parameter(0)
  ROOT %more = pred[] compare(%x, %x), direction=LT
}

%inner (y: s32[]) -> s32[] {
  ROOT %y = s32[] parameter(0)
}

%outer (z: s32[]) -> s32[] {
  %z = s32[] parameter(0)
  ROOT %chunks = s32[] while(%z), condition=%condition, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %layers = s32[] while(%p), condition=%condition, body=%outer, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %once = s32[] while(%layers), condition=%condition, body=%inner, backend_config={"known_trip_count":{"n":"2"}}
}
"""


def test_a_loop_in_a_loop_counts_for_each_turn_of_the_outer_one():
    counts = {c.name: n for c, n in hlo.parse(LOOPS).scheduled_computations()}
    assert counts == {"main": 1, "outer": 4, "inner": 4 * 3 + 2, "condition": 4 + 4 * 3 + 2}


@pytest.mark.parametrize(
    ("target", "name", "kind", "axes", "size", "network"),
    [
        ('"{1,2,3,4}x{0:1}"', "ALL_REDUCE", "all-reduce", "data", 4, 2 * SENT * 3 / 4),
        ("{{100000,200000},{100001,200001},{300000,400000}}", "ALL_REDUCE", "all-reduce", "data", 2, SENT),
        ("{{100000,300000},{100001,300001}}", "ALL_TO_ALL", "all-to-all", "pipeline", 2, SENT / 2),
        ("{{100000->200000},{200000->100000}}", "ONE_TO_ONE", "collective-permute", "data", 2, SENT),
    ],
)
def test_what_goes_to_other_slices_goes_over_the_network(target, name, kind, axes, size, network):
    text = SLICES.replace('"{1,2,3,4}x{0:1}"', target).replace('"ALL_REDUCE"', f'"{name}"')
    module = hlo.parse(text)
    assert set(module.computations) == {"on_a_sparse_core", "main"}
    shape = {"data": 8, "fsdp": 2} if size == 4 else {"pipeline": 2, "data": 2, "fsdp": 4}
    (actual,) = collectives(module, Places(shape, np.arange(16) // 4))
    assert (actual.kind, actual.axes, actual.size, actual.asynchronous) == (kind, axes, size, True)
    assert (actual.link_bytes, actual.network_bytes) == (0.0, network)


# Work for the sparse cores, which XLA:TPU writes as a call on another thread.
SPARSE = """\
HloModule jit_step, is_scheduled=true

%called (param_0: bf16[64,128], param_1: token[]) -> bf16[64,128] {
  %param_1 = token[] parameter(1)
  %param_0 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %sum = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%param_0), channel_id=5, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, use_global_device_ids=true, to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (p0: bf16[64,128]) -> bf16[64,128] {
  %p0 = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %ready = token[] after-all()
  %started = ((bf16[64,128]{1,0:T(8,128)(2,1)}, token[]), bf16[64,128]{1,0:T(8,128)(2,1)}) call-start(%p0, %ready), async_execution_thread="sparsecore", to_apply=%called
  ROOT %done = bf16[64,128]{1,0:T(8,128)(2,1)} call-done(%started)
}
"""


def test_what_the_sparse_cores_send():
    (actual,) = collectives(hlo.parse(SPARSE), Places({"data": 2, "fsdp": 4}, np.zeros(8, int)))
    assert (actual.kind, actual.axes, actual.size, actual.asynchronous) == ("all-reduce", "fsdp", 4, True)
    assert actual.bytes == bytes_sent("all-reduce", 64 * 128 * 2, 4)
    assert traffic.hbm_bytes(hlo.parse(SPARSE)) == 2 * 64 * 128 * 2


def test_a_target_that_is_not_known_is_no_guess():
    with pytest.raises(ValueError, match="target between slices"):
        collectives(hlo.parse(SLICES.replace('"{1,2,3,4}x{0:1}"', '"all"')), Places({"data": 16}, np.arange(16) // 4))


def test_a_gpu_program():
    module = hlo.parse(GPU)
    # Two hosts with four devices each. The axis `data` crosses hosts.
    places = Places({"data": 2, "fsdp": 2, "tensor": 2}, np.repeat([0, 1], 4))
    results = {c.kind: c for c in collectives(module, places)}
    gather, scatter, ring = (results[k] for k in ("all-gather", "reduce-scatter", "collective-permute"))
    assert (gather.axes, gather.times, gather.asynchronous) == ("data+fsdp+tensor", 10, True)
    assert gather.link_bytes == 7 * 4 * 8 * 4
    # The operand of a host is the data of its four devices. Each device sends a quarter of it to the other host.
    assert gather.network_bytes == 4 * 8 * 4
    assert (scatter.axes, scatter.size, scatter.asynchronous) == ("data+fsdp", 4, True)
    assert scatter.network_bytes == 32 * 8 * 4 * (1 / 2) / 2
    assert (ring.axes, ring.times, ring.link_bytes, ring.network_bytes) == ("data+fsdp", 1, 0, 10 * 4 * 8 * 4)
    assert sum_by_axes(list(results.values())) == {
        "data+fsdp+tensor": gather.bytes,
        "data+fsdp": scatter.bytes + ring.bytes,
    }
    # Each execution of the fused slice reads only one of ten layers.
    loop = next(c for c, _ in module.scheduled_computations() if c.name == "body")
    assert traffic._bytes_moved(module, loop, loop.instructions["weight"]) == 4 * 8 * 4 * 2 + 4


# A matmul with one layer's slice of the stacked activations. XLA:TPU puts the slice into a nested fusion.
NESTED = """\
HloModule jit_step, is_scheduled=true

%one_layer (kept: bf16[80,16,32], index: s32[]) -> bf16[16,32] {
  %kept = bf16[80,16,32]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = bf16[1,16,32]{2,1,0} dynamic-slice(%kept, %index, %zero, %zero), dynamic_slice_sizes={1,16,32}
  ROOT %row = bf16[16,32]{1,0} bitcast(%cut)
}

%product (kept.1: bf16[80,16,32], index.1: s32[], right: bf16[32,8]) -> bf16[16,8] {
  %kept.1 = bf16[80,16,32]{2,1,0} parameter(0)
  %index.1 = s32[] parameter(1)
  %right = bf16[32,8]{1,0} parameter(2)
  %left = bf16[16,32]{1,0} fusion(%kept.1, %index.1), kind=kLoop, calls=%one_layer
  ROOT %dot = bf16[16,8]{1,0} convolution(%left, %right), dim_labels=bf_io->bf
}

ENTRY %main (p0: bf16[80,16,32], p1: s32[], p2: bf16[32,8]) -> bf16[16,8] {
  %p0 = bf16[80,16,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[32,8]{1,0} parameter(2)
  ROOT %out = bf16[16,8]{1,0} fusion(%p0, %p1, %p2), kind=kOutput, calls=%product
}
"""


def test_a_slice_in_a_fusion_inside_of_a_fusion_counts_as_a_slice():
    read = 16 * 32 * 2 + 4 + 32 * 8 * 2
    assert traffic.hbm_bytes(hlo.parse(NESTED)) == read + 16 * 8 * 2
    whole = NESTED.replace(
        "ROOT %row = bf16[16,32]{1,0} bitcast(%cut)", "ROOT %row = bf16[16,32]{1,0} custom-call(%kept)"
    )
    assert traffic.hbm_bytes(hlo.parse(whole)) == read + 16 * 8 * 2 + 79 * 16 * 32 * 2


def test_a_loop_of_unknown_length_is_named():
    module = hlo.parse(GPU.replace(', backend_config={"known_trip_count":{"n":"10"}}', ""))
    assert module.unknown_loops() == ["loop"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['x'=2,'y'=2] {'y'}", [[0, 1], [2, 3]]),
        ("mesh['x'=2,'y'=2] {'x'}", [[0, 2], [1, 3]]),
        ("mesh['x'=4] {'x':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['x'=4] {'x':(1)2}", [[0, 2], [1, 3]]),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", [[0, 2], [1, 3]]),
        ("mesh['x'=2,'y'=2], device_ids=(0,3,1,2) {'y'}", [[0, 3], [1, 2]]),
    ],
)
def test_replica_groups(text, expected):
    assert replica_groups(text, 4).tolist() == expected


def test_a_form_that_is_not_known_is_no_guess():
    with pytest.raises(ValueError, match="unknown form"):
        replica_groups("grid['x'=4] {'x'}", 4)
    rest = "channel_id=1, replica_groups=mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}, dimensions={0}"
    instruction = hlo.Instruction("a", "f32[]", "all-gather", (), rest, "", False)
    assert instruction.attribute("replica_groups") == "mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}"
    assert instruction.attribute("dimensions") == "{0}"


def test_ring_formulas():
    assert [bytes_sent(k, 8.0, 4) for k in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")] == [
        24,
        6,
        12,
        6,
    ]
    assert bytes_sent("all-reduce", 8.0, 1) == 0
