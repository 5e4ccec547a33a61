"""`DraftModel`: draft tokens with a second, smaller model that has the same tokens (Leviathan et al., 2023)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from axlearn_core.config import REQUIRED, Configurable, node, setting
from axlearn_core.errors import AxlearnError, RequestError
from axlearn_plugins_serving.contracts import Row, Runner, Sampling
from axlearn_plugins_serving.request_state import RequestState
from axlearn_plugins_transformer.text.decoding import HasTokenizerJson
from axlearn_plugins_transformer.text.processor import TextProcessor

if TYPE_CHECKING:
    from axlearn_plugins_serving.engine import ServingEngine
    from axlearn_plugins_serving.open_engine import OpenedEngine

GREEDY = Sampling(temperature=0.0)


@attrs.define
class _Slot:
    """The cached positions of a slot.

    Attributes:
        owner: Arrival number of the request whose tokens were compared with `tokens`.
        tokens: Tokens whose keys and values are in the cache, in order of position. The last ones may be drafts.
        agreed: Number of leading `tokens` that are tokens of the owner.
    """

    owner: int = -1
    tokens: list[int] = attrs.field(factory=list)
    agreed: int = 0

    def keep_prefix(self, state: RequestState) -> int:
        """Drop the tokens that do not begin the request. Returns the number of tokens that remain.

        The last token of the request never remains, because its output is the first draft.
        """
        if self.owner != state.arrival:
            self.owner, self.agreed = state.arrival, 0
        most = min(len(self.tokens), len(state.tokens) - 1)
        while self.agreed < most and self.tokens[self.agreed] == state.tokens[self.agreed]:
            self.agreed += 1
        self.agreed = min(self.agreed, most)
        del self.tokens[self.agreed :]
        return self.agreed


class DraftModel(Configurable):
    """Draft with a second model, for all requests of a step at once.

    The model has its own runner and cache. A request has the same slot in both runners, and each slot has its own blocks.
    A draft first computes the request's tokens that are new since its last draft. Then it decodes the most likely tokens.

    Args:
        cfg: Config of the drafter.
        runner: Runner of the served model.
        text: Text processor of the served model, or None if it has no tokenizer.

    Raises:
        RequestError: There is no model at the path, or it has other tokens, a shorter position table, or recurrent layers.
    """

    @node
    class Config(Configurable.Config["DraftModel"]):
        """The model, and the size of its drafts.

        Attributes:
            path: Run, directory in Hugging Face format, or URI of the draft model.
            step: Checkpoint of a run. None opens the newest.
            length: Maximum number of tokens in a draft.
            max_step_tokens: Maximum number of prompt tokens that the draft model computes per step. A request has no drafts until
                its prompt was computed.
        """

        path: str = REQUIRED
        step: int | None = None
        length: int = setting(default=4, ge=1)
        max_step_tokens: int = setting(default=256, ge=1)

    def __init__(self, cfg: Config, *, runner: Runner, text: TextProcessor | None = None):
        self.length, self.vocab_size = cfg.length, runner.vocab_size
        opened = _open(cfg, runner)
        self._engine = opened.engine
        self._runner: Runner = opened.engine.runner
        self._slots = [_Slot() for _ in range(runner.max_rows)]
        self._positions = self._runner.max_blocks_per_request * self._runner.block_size
        try:
            _check_model(cfg.path, opened, runner.vocab_size, text)
        except RequestError:
            self.close()
            raise
        self._assign_slots()

    @property
    def compilations(self) -> int:
        """The number of functions compiled since `warm_up` ended."""
        return self._runner.compilations

    def warm_up(self) -> None:
        """Compile all functions of the draft model."""
        self._runner.warm_up()

    def draft(self, state: RequestState, most: int) -> Sequence[int]:
        """See `Drafter.draft`."""
        return self.draft_all([(state, most)])[0]

    def draft_all(self, requests: Sequence[tuple[RequestState, int]]) -> Sequence[Sequence[int]]:
        """See `DraftsTogether.draft_all`."""
        try:
            return self._draft_all(requests)
        except Exception:
            self._forget()  # the content of the cache is unknown
            raise

    def release_memory(self, level: int) -> None:
        """See `ReleasesMemory.release_memory`."""
        self._engine.sleep(level)
        self._forget()

    def restore_memory(self) -> None:
        """See `ReleasesMemory.restore_memory`."""
        self._engine.wake_up()

    def close(self) -> None:
        """See `HoldsResources.close`."""
        self._engine.close()

    def _draft_all(self, requests: Sequence[tuple[RequestState, int]]) -> list[Sequence[int]]:
        new_tokens: list[Row] = []
        drafting: list[int] = []
        chunk = self._runner.chunk
        budget = min(self._runner.max_prompt_tokens, self._runner.max_batch_tokens - len(requests))
        for index, (state, _) in enumerate(requests):
            row = self._next_row(state, budget)
            if row is not None:
                new_tokens.append(row)
                budget -= -(-len(row.tokens) // chunk) * chunk if len(row.tokens) > 1 else 0
                if row.sample:
                    drafting.append(index)
        if not new_tokens:
            return [()] * len(requests)
        first = self._runner.submit(new_tokens)
        steps = min(self.length, max((requests[index][1] for index in drafting), default=0))
        rows = [self._draft_row(requests[index][0]) for index in drafting]
        # The last draft is computed too, so that the next call has one new token, even if all drafts are accepted.
        rest = self._runner.submit(rows, steps) if rows else None
        first_tokens = [int(result.tokens[0]) for result in first.wait() if result.tokens]
        results = [] if rest is None else rest.wait()
        drafts: list[Sequence[int]] = [()] * len(requests)
        for index, token, result in zip(drafting, first_tokens, results, strict=True):
            state, most = requests[index]
            draft = [token, *map(int, result.tokens)][:steps]
            self._slot(state).tokens += draft
            valid = next((i for i, token in enumerate(draft) if token >= self.vocab_size), len(draft))
            drafts[index] = draft[: min(valid, most)]
        return drafts

    def _next_row(self, state: RequestState, budget: int) -> Row | None:
        """Return the row that computes the new tokens of a request, or the first of them. Returns None if it cannot be drafted."""
        start = self._slot(state).keep_prefix(state)
        new = state.tokens[start:]
        if len(state.tokens) + self.length > self._positions or max(new) >= self._runner.vocab_size:
            return None
        count = len(new) if len(new) == 1 else min(len(new), budget)
        if count < 1 or (count == 1 and len(new) > 1):
            return None
        assert state.slot is not None
        self._slot(state).tokens += new[:count]
        self._slot(state).agreed += count
        return Row(
            slot=state.slot, tokens=new[:count], start=start, blocks=self._blocks(state.slot), sample=count == len(new)
        )

    def _draft_row(self, state: RequestState) -> Row:
        """Return the row that decodes after the last token of a request."""
        assert state.slot is not None
        return Row(slot=state.slot, start=len(state.tokens), blocks=self._blocks(state.slot))

    def _slot(self, state: RequestState) -> _Slot:
        assert state.slot is not None
        return self._slots[state.slot]

    def _blocks(self, slot: int) -> range:
        each = self._runner.max_blocks_per_request
        return range(slot * each, (slot + 1) * each)

    def _forget(self) -> None:
        self._slots = [_Slot() for _ in self._slots]

    def _assign_slots(self) -> None:
        for slot in range(len(self._slots)):
            self._runner.assign(slot, GREEDY, 0, ())


def _open(cfg: DraftModel.Config, runner: Runner) -> "OpenedEngine":
    """Open the draft model, with as many slots and as long a context as the served model."""
    from axlearn_plugins_serving.open_engine import (
        open_engine,  # which imports the engine, and the engine imports drafters
    )

    try:
        return open_engine(cfg.path, config=_engine_config(cfg, runner), step=cfg.step, warm_up=False)
    except AxlearnError as error:
        raise RequestError(f"the model of serving.drafter.path={cfg.path} cannot draft: {error}") from error


def _engine_config(cfg: DraftModel.Config, runner: Runner) -> "ServingEngine.Config":
    from axlearn_plugins_serving.engine import ServingEngine
    from axlearn_plugins_serving.runner import ModelRunner

    sizes = ModelRunner.Config(
        block_size=runner.block_size,
        max_rows=runner.max_rows,
        max_context=runner.max_context,
        beyond_context=True,  # wrong drafts do not change outputs
        max_step_tokens=cfg.max_step_tokens,
        chunk_buckets=(1, 2),
        decode_steps=cfg.length,
        pooling="off",
    )
    return ServingEngine.Config(runner=sizes, prefix_cache=False, tensor_parallel=1)


def _check_model(path: str, opened: "OpenedEngine", vocab_size: int, text: TextProcessor | None) -> None:
    """Raise `RequestError` if a model cannot draft for the served model."""
    if opened.engine.cache.snapshots is not None or opened.engine.prefix:
        raise RequestError(
            "a model with recurrent layers or a bidirectional prefix cannot draft, because its state cannot return to before a "
            f"rejected draft\n    got: serving.drafter.path={path}\n    fix: name a model with attention, or use ngram-drafter"
        )
    problem = _compare_vocabularies(opened, vocab_size, text)
    if problem is not None:
        raise RequestError(
            f"the draft model does not have the vocabulary of the served model\n    got: {path}: {problem[0]}\n"
            f"    expected: {problem[1]}\n    fix: name a model with the same tokenizer, or use ngram-drafter"
        )


def _compare_vocabularies(
    opened: "OpenedEngine", vocab_size: int, text: TextProcessor | None
) -> tuple[str, str] | None:
    """Return a difference between the vocabularies as (got, expected), or None. One of them may have additional tokens."""
    if text is None or opened.text is None:
        sizes = opened.engine.vocab_size, vocab_size
        return None if sizes[0] == sizes[1] else (f"{sizes[0]:,} tokens", f"{sizes[1]:,} tokens")
    if _json(text.tokenizer) is not None and _json(text.tokenizer) == _json(opened.text.tokenizer):
        return None
    for token in range(min(text.tokenizer.vocab_size, opened.text.tokenizer.vocab_size)):
        spellings = opened.text.spell([token]), text.spell([token])
        if spellings[0] != spellings[1]:
            return f"token {token} is {spellings[0]!r}", f"{spellings[1]!r}"
    return None


def _json(tokenizer: Any) -> str | None:
    return tokenizer.to_json() if isinstance(tokenizer, HasTokenizerJson) else None
