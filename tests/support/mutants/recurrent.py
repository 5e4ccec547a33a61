"""Wrong recurrent layers."""

import jax
import jax.numpy as jnp
from jax import lax

from axlearn_core.config import REQUIRED, interface, node
from axlearn_core.nn.layer import Layer
from axlearn_plugins_transformer.cache_spec import CacheEntry
from axlearn_plugins_transformer.layer_roles import RecurrentRole
from axlearn_plugins_transformer.recurrence import run_recurrent
from axlearn_plugins_transformer.testing import RecurrentSuite
from support.mutants.harness import mutants, suite


class Average(Layer):
    """A decaying average of the tokens of a document, and wrong variants of it."""

    @node
    class Config(Layer.Config["Average"], RecurrentRole):
        input_dim: int = interface(default=REQUIRED)
        wrong: str = ""

    def cache_spec(self):
        per = "token" if self.cfg.wrong == "per" else "request"
        return CacheEntry(per=per, shape=(self.cfg.input_dim,), dtype="float32")

    def __call__(self, x, context, cache=None):
        return run_recurrent(self.mix, x, context, cache)

    def mix(self, x, sequences, state):
        wrong, reload = self.cfg.wrong, sequences.reload
        rows, length, width = x.shape
        documents, real = sequences.documents(), sequences.real
        new = jnp.zeros((rows, length), bool)
        if documents is not None and wrong != "documents":
            new = jnp.pad(jnp.diff(documents, axis=1) != 0, [(0, 0), (1, 0)])
        if real is None or wrong == "padding":
            real = jnp.ones((rows, length), bool)
        first = jnp.zeros((rows, width)) if state is None or wrong == "state" else state

        def step(average, token):
            value, new, real, index = token
            average = jnp.where(new[:, None], 0.0, average)
            if reload is not None and wrong != "reload":
                chunk = index // reload.chunk
                restarts = (index % reload.chunk == 0) & reload.restarts[:, chunk]
                average = jnp.where(restarts[:, None], reload.states[:, chunk], average)
            average = jnp.where(real[:, None], 0.9 * average + 0.1 * value, average)
            return average, average

        tokens = (jnp.moveaxis(x, 1, 0), new.T, real.T, jnp.arange(length))
        last, averages = lax.scan(step, first, tokens)
        averages = jnp.moveaxis(averages, 0, 1)
        after = last if reload is None else averages[:, reload.chunk - 1 :: reload.chunk]
        if reload is not None and wrong == "last":
            after = jnp.broadcast_to(last[:, None], after.shape)
        return averages, jax.tree.map(lambda s: s.astype("bfloat16") if wrong == "dtype" else s, after)


def _layer(wrong: str = "") -> type:
    return suite(RecurrentSuite, Average.Config(wrong=wrong))


MUTANTS = mutants(
    _layer(),
    {
        "keeps its state per token": (_layer("per"), "test_entries_belong_to_requests"),
        "returns its state in a different dtype": (_layer("dtype"), "test_the_cache_keeps_its_shape"),
        "ignores its state": (_layer("state"), "test_chunks_are_the_whole"),
        "continues the state of the previous document": (
            _layer("documents"),
            "test_documents_begin_with_the_empty_state",
        ),
        "reads padding": (_layer("padding"), "test_padding_leaves_the_state_unchanged"),
        "mixes the requests of a step": (_layer("reload"), "test_steps_of_a_server_are_the_whole"),
        "returns one state for all chunks": (_layer("last"), "test_steps_of_a_server_are_the_whole"),
        "resumes from the wrong state": (_layer("reload"), "test_preempted_requests_resume_from_saved_states"),
    },
)
