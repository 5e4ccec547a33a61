"""What distinguishes configs that differ in more than sizes."""

import axlearn_core as ax
from axlearn_plugins_verify.prove.structure import describe_structure

SIZES = {"model.decoder.num_layers": 2, "model.decoder.hidden_dim": 32, "model.vocab_size": 64}


def structure(*features, **settings):
    names = {name.replace("__", "."): value for name, value in settings.items()}
    return describe_structure(ax.resolve("quickstart", with_=features, set={**SIZES, **names}).config)


def test_sizes_do_not_matter():
    assert structure() == structure(model__decoder__num_layers=3, model__decoder__hidden_dim=64)


def test_layers_arrays_and_control_flow_matter():
    plain, experts = structure(), structure("moe")
    assert plain.parts != experts.parts
    assert any("top_k" in name for name in plain.operations ^ experts.operations)
    scanned, unrolled = structure("scan:on=true"), structure("scan:on=false")
    assert unrolled.parts == scanned.parts
    lost = scanned.lost_operations(unrolled)
    assert "scan" in lost
    assert any(name.startswith("scan/") and name.endswith("/rsqrt") for name in lost)
    assert not scanned.lost_operations(scanned)
