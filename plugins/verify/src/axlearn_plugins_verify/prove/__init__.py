"""Check the properties of a shrunk config: `axlearn prove`.

proof = prove("quickstart", with_=["moe"], minutes=2)
print(proof.holds, proof.failures)
"""

from typing import TYPE_CHECKING

from axlearn_core.compat import lazy_names, make_callable

if TYPE_CHECKING:
    from axlearn_plugins_verify.prove.checks import Check
    from axlearn_plugins_verify.prove.proof import Proof, prove

__all__ = ["Check", "Proof", "prove"]

_MODULES = {"Check": "checks", "Proof": "proof", "prove": "proof"}
__getattr__ = lazy_names(__name__, _MODULES)
make_callable(__name__)
