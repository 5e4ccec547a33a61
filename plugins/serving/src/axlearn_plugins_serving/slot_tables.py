"""The sampling state of the slots of a runner, on the devices.

Legend: A slots.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from axlearn_core.compose.model_program import ModelProgram
from axlearn_plugins_serving.contracts import Row, Sampling
from axlearn_plugins_serving.token_sampling import Tables, table_row

PLAIN = ("adapter", "seed", "top_k", "temperature", "top_p", "min_p")
"""Columns of the tables that differ between plain requests: those without biases, penalties and earlier output."""
PLAIN_COLUMNS = 1 + len(PLAIN)
"""Number of columns of a packed row: its slot, and `PLAIN`."""


class SlotTables:
    """Assigns slots to requests. Plain requests that start in the same step are assigned in one call.

    Args:
        program: Program that declares the functions.
        max_rows: Number of slots.
        vocab_size: Size of the vocabulary.

    Attributes:
        arrays: The tables. A step donates them and sets those that it returns.
    """

    def __init__(self, program: ModelProgram, max_rows: int, vocab_size: int):
        self._program, self._max_rows, self._vocab_size = program, max_rows, vocab_size
        self._plain: dict[int, np.ndarray] = {}  # packed rows that the next step assigns, by slot
        self.arrays: Any = program.compile("serve_tables")()

    def assign(
        self, slot: int, sampling: Sampling, seed: int, output: Sequence[int], adapter: int, prompt: Sequence[int]
    ) -> None:
        """Assign a slot to a request before the next step. See `Runner.assign`; `adapter` is its number, 0 for none."""
        if not output and not sampling.adjusts_logits:
            self._plain[slot] = pack_plain_row(slot, sampling, seed, self._vocab_size, adapter)
            return
        self._plain.pop(slot, None)
        row = table_row(sampling, seed, output, self._vocab_size, adapter, prompt)
        self.arrays = self._program.compile("serve_assign")(self.arrays, np.int32(slot), row)

    def prepare(self, rows: Sequence[Row]) -> None:
        """Write the assigned slots, and the masks of the rows of a step."""
        if self._plain:
            packed = np.full((self._max_rows, PLAIN_COLUMNS), self._max_rows, np.int32)
            packed[: len(self._plain)] = [*self._plain.values()]
            self.arrays = self._program.compile("serve_assign_plain")(self.arrays, packed)
            self._plain.clear()
        masked = [row for row in rows if row.mask is not None]
        if masked:
            slots = np.full((self._max_rows,), self._max_rows, np.int32)
            masks = np.zeros((self._max_rows, -(-self._vocab_size // 32)), np.uint32)
            for index, row in enumerate(masked):
                slots[index], masks[index] = row.slot, np.asarray(row.mask)
            self.arrays = self._program.compile("serve_mask")(self.arrays, slots, masks)


def pack_plain_row(slot: int, sampling: Sampling, seed: int, vocab: int, adapter: int) -> np.ndarray:
    """Return the slot and the columns `PLAIN` of a request as int32 [PLAIN_COLUMNS], with the values of `table_row`."""
    packed = np.array([slot, adapter, 0, min(sampling.top_k or vocab, vocab), 0, 0, 0], np.int32)
    packed[2:3].view(np.uint32)[:] = seed % 2**32
    temperature = 0.0 if sampling.is_greedy else sampling.temperature
    packed[4:].view(np.float32)[:] = temperature, sampling.top_p, sampling.min_p
    return packed


def assign_plain_rows(tables: Tables, packed: jax.Array) -> Tables:
    """Write packed rows, int32 [A, PLAIN_COLUMNS]. Rows whose slot is A are ignored.

    All other columns of the assigned slots get their initial values.
    """
    slots, columns = packed[:, 0], {name: packed[:, 1 + index] for index, name in enumerate(PLAIN)}
    old_columns, initial = vars(tables), vars(Tables.init(1, tables.counts.shape[1]))

    def write(name: str) -> jax.Array:
        old = old_columns[name]
        values = lax.bitcast_convert_type(columns[name], old.dtype) if name in columns else initial[name]
        return old.at[slots].set(values, mode="drop")

    return Tables(**{field.name: write(field.name) for field in dataclasses.fields(Tables)})
