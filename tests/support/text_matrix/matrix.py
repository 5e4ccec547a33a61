"""Compare every route from text to tokens with `transformers`, fact by fact.

    PYTHONPATH=tests uv run --group parity python -m support.text_matrix.matrix [FAMILY ...]

`--store` rewrites `stored.json`: the values of `transformers` for one family, for tests without it.
"""

import argparse
import collections
import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.text_matrix import reference as texts
from support.text_matrix.models import BEYOND, FAMILIES, make_model
from support.text_matrix.routes import Route
from support.text_matrix.served import ROUTES, Export

STORED = Path(__file__).with_name("stored.json")
STORED_FAMILY = "llama3"
ONE_BOS = "a text that begins with a BOS token gets no second one"
TEXT_STAYS = "special tokens that a document spells out stay text unless input.special_tokens is 'parse'"
END_BEFORE = "without a BOS token, a document begins with the end-of-document token"
FIXED_DATE = "templates see a fixed date in training data, so that equal data gives equal tokens"
SCALED = "RoPE that is scaled by a factor reaches that much further than max_position_embeddings"
RENDERED = "takes text: whoever renders the conversation decides"
OWN_DTYPE = "parameters that were trained are exported in their own dtype unless --dtype asks for another"
_CHATS = ("tools", "tool call", "tool result", "null content", "date")
NOT_APPLICABLE: Mapping[tuple[str, str], str] = {
    **{(fact, route): RENDERED for fact in _CHATS for route in ("DPO", "generate")},
    ("tools", "harness"): "the harness passes no tools to templates",
    ("sampling", "harness"): "tasks say how to sample, and the harness is greedy otherwise",
    ("sampling", "evaluation"): "nothing is sampled",
}
"""(fact, route) -> why there is nothing to compare."""


class Check(NamedTuple):
    """Two values that must be equal, and why the second is not that of `transformers` if it is not."""

    got: Any
    expected: Any
    difference: str = ""


class Cell(NamedTuple):
    """One fact on one route: `equal`, `deliberate` or `not applicable` with a reason, or `wrong` with both values."""

    fact: str
    route: str
    status: str
    detail: str = ""


def _first(route: Route) -> tuple[list[int], str]:
    """Return (first token of a document, reason if it differs from that of `transformers`)."""
    reference = route.reference
    bos = reference["prompt"][: len(reference["prompt"]) - len(reference["plain"])]
    return (bos, "") if bos else ([reference["eos"]], END_BEFORE)


def _end(route: Route) -> list[int]:
    return [] if route.name == "evaluation" else [route.reference["eos"]]


def bos(route: Route) -> Iterator[Check]:
    """Check the token that begins a text."""
    reference = route.reference
    got = route.encode(reference["text"])
    if route.reads == "prompt":
        yield Check(got, reference["prompt"])
    else:
        first, reason = _first(route)
        yield Check(got, [*first, *reference["plain"], *_end(route)], reason)


def second_bos(route: Route) -> Iterator[Check]:
    """Check a text that begins with the BOS token."""
    reference = route.reference
    text, doubled = reference["bos token"] + reference["text"], reference["prompt with bos"]
    reason = ONE_BOS if doubled != reference["plain with bos"] else ""
    if route.reads == "prompt":
        yield Check(route.encode(text), reference["plain with bos"], reason)
    else:
        first, _ = _first(route)
        yield Check(route.encode(text), [*first, *reference["split with bos"], *_end(route)], TEXT_STAYS)


def special(route: Route) -> Iterator[Check]:
    """Check special tokens that a text contains."""
    reference = route.reference
    if route.reads == "prompt":
        yield Check(route.encode(texts.SPELLED), reference["special"])
        return
    first, reason = _first(route)
    yield Check(route.encode(texts.SPELLED), [*first, *reference["split special"], *_end(route)], TEXT_STAYS)
    parsed = route.encode(texts.SPELLED, "parse")
    if route.name == "evaluation":  # what stands before an answer
        yield Check(parsed, reference["special"])
    else:
        yield Check(parsed, [*first, *reference["plain special"], *_end(route)], reason)


def end_tokens(route: Route) -> Iterator[Check]:
    """Check the ids that end an output, and the text that the model writes up to one of them."""
    yield Check(route.end_tokens(), route.reference["end tokens"])
    if type(route).write is not Route.write and route.reference["written"] is not None:
        yield Check(route.write(route.reference["text"]), route.reference["written"])


def conversation(fact: str) -> Callable[[Route], Iterator[Check]]:
    """Check a fact about conversations, by the ids of `CHATS[fact]`."""

    def check(route: Route) -> Iterator[Check]:
        reason = FIXED_DATE if fact == "date" and route.clock == "fixed" else ""
        if route.reads == "prompt":
            got = route.encode_chat(fact)
            yield Check(got, _on_day(route.reference["asked"][fact]) if route.clock == "now" else got, reason)
            return
        got, expected = route.encode_chat(fact), route.reference["chats"][fact]
        if route.name == "DPO":
            first, difference = _first(route)
            yield Check(got, expected if expected[:1] == first else [*first, *expected], difference)
            return
        yield Check(got, expected, reason)
        yield Check(route.answers(fact), route.reference["answers"][fact], reason)

    return check


def _on_day(ids: Sequence[int]) -> list[int]:
    """Return the ids of a conversation with today's date instead of `FIXED_DAY`; each digit is one token."""
    digits = {d: i for i, d in _digits().items()}
    old, new = ([digits[c] for c in day] for day in (texts.FIXED_DAY, datetime.date.today().isoformat()))
    at = next((i for i in range(len(ids)) if list(ids[i : i + len(old)]) == old), None)
    return list(ids) if at is None else [*ids[:at], *new, *ids[at + len(old) :]]


def _digits() -> dict[int, str]:
    from support.text_matrix.models import _make_tokenizer

    vocabulary = _make_tokenizer(False).get_vocab()
    return {vocabulary[c]: c for c in "0123456789-"}


def beyond(route: Route) -> Iterator[Check]:
    """Check an added token without a row in the model: it has an id, but a text with it is refused."""
    yield Check(route.text.tokenizer.encode_special(texts.BEYOND_TEXT)[0], route.reference["beyond"])
    refusal = route.refusal()
    yield Check(refusal if BEYOND not in refusal else BEYOND, BEYOND)


def dtype(route: Route) -> Iterator[Check]:
    """Check the compute dtype of the model."""
    if route.name == "export of a tuned run":
        yield Check(route.dtype(), "float32", OWN_DTYPE)
    else:
        yield Check(route.dtype(), route.reference["dtype"])


def context_length(route: Route) -> Iterator[Check]:
    """Check the context length of the model."""
    if route.reference["family"] == "llama2-linear":
        yield Check(route.context_length(), 2 * route.reference["context length"], SCALED)
    else:
        yield Check(route.context_length(), route.reference["context length"])


def sampling(route: Route) -> Iterator[Check]:
    """The defaults of requests."""
    yield Check(route.sampling(), route.reference["sampling"])


FACTS: Mapping[str, tuple[Callable[[Route], Iterator[Check]], tuple[str, ...]]] = {
    "BOS": (bos, ("prompt",)),
    "second BOS": (second_bos, ("prompt with bos",)),
    "end tokens": (end_tokens, ("end tokens", "eos", "written")),
    "template": (conversation("template"), ("chats", "answers")),
    **{fact: (conversation(fact), ("chats", "asked")) for fact in _CHATS},
    "special token": (special, ("special", "split special")),
    "beyond the rows": (beyond, ("beyond", "rows")),
    "dtype": (dtype, ("dtype",)),
    "context length": (context_length, ("context length",)),
    "sampling": (sampling, ("sampling",)),
}
"""Fact -> (its checks, the values of `transformers` that an exported directory must give again)."""


def cells(directory: Path, folder: Path, reference: Mapping[str, Any], routes: Sequence[type[Route]]) -> Iterator[Cell]:
    """Return the cells of one family.

    Args:
        directory: of the model.
        folder: for runs and exports.
        reference: what `transformers` makes of the directory.
        routes: to try.
    """
    for kind in routes:
        route = kind(directory, folder, reference)
        failed, again = _read_again(route)
        for fact, (check, keys) in FACTS.items():
            if reason := NOT_APPLICABLE.get((fact, route.name)):
                yield Cell(fact, route.name, "not applicable", reason)
                continue
            checks = [*failed, *_run(check, route)]
            checks += [Check(again[key], _exported(route, key)) for key in keys if again is not None]
            yield _cell(fact, route.name, checks)


def _read_again(route: Route) -> tuple[list[Check], Any]:
    """(checks that failed, what `transformers` reads in the directory that a route exports; None if it exports none)."""
    if "transformers" not in sys.modules or not isinstance(route, Export):
        return [], None
    try:
        return [], texts.read_reference(route.exported, route.reference["text"])
    except Exception as error:  # a directory that cannot be exported or loaded makes all of its cells wrong
        return [_failed(error)], None


def _exported(route: Route, key: str) -> Any:
    """Return the facts that `transformers` must read in an exported directory."""
    return "float32" if (key, route.name) == ("dtype", "export of a tuned run") else route.reference[key]


def _run(check: Callable[[Route], Iterator[Check]], route: Route) -> list[Check]:
    try:
        return list(check(route))
    except Exception as error:  # a cell that fails is a result
        return [_failed(error)]


def _failed(error: Exception) -> Check:
    return Check(f"{type(error).__name__}: {error}", "no error")


def _cell(fact: str, route: str, checks: Sequence[Check]) -> Cell:
    for got, expected, _ in checks:
        if got != expected:
            return Cell(fact, route, "wrong", f"got {got}, expected {expected}")
    reasons = [c.difference for c in checks if c.difference]
    return Cell(fact, route, "deliberate" if reasons else "equal", reasons[0] if reasons else "")


SIGNS = {"equal": "=", "deliberate": "d", "not applicable": "-", "wrong": "X"}


def report(results: Mapping[str, Sequence[Cell]]) -> str:
    """Return the table of all families with its counts."""
    signs: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for cells in results.values():
        for cell in cells:
            signs[cell.fact, cell.route].add(SIGNS[cell.status])
    routes = list(dict.fromkeys(route for _, route in signs))
    lines = [f"{'':16}" + " ".join(f"{i:>3}" for i in range(1, len(routes) + 1))]
    for fact in FACTS:
        row = ("".join(sorted(signs[fact, route])) for route in routes)
        lines.append(f"{fact:16}" + " ".join(f"{s:>3}" for s in row))
    lines += ["", *(f"{i:>3} {route}" for i, route in enumerate(routes, 1)), ""]
    every = [cell for cells in results.values() for cell in cells]
    count = collections.Counter(cell.status for cell in every)
    applicable = len(every) - count["not applicable"]
    lines.append(f"{len(results)} families, {len(every)} cells: {applicable} apply ({applicable / len(every):.0%})")
    lines += [f"  {SIGNS[status]} {status}: {count[status]}" for status in SIGNS]
    for status in ("deliberate", "not applicable"):
        reasons = collections.Counter(cell.detail for cell in every if cell.status == status)
        lines += [f"{status}: {reason} ({n})" for reason, n in reasons.items()]
    wrong = [(family, c) for family, cells in results.items() for c in cells if c.status == "wrong"]
    lines += [f"wrong: {family}, {c.fact}, {c.route}: {c.detail[:400]}" for family, c in wrong]
    return "\n".join(lines)


def family_cells(family: str, routes: Sequence[type[Route]] = ROUTES) -> list[Cell]:
    """Compare the cells of a family with `transformers`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = texts.make_with_reference(family, folder / "model")
        return list(cells(folder / "model", folder, reference, routes))


def stored_cells(folder: Path, routes: Sequence[type[Route]], *, write: bool = True) -> list[Cell]:
    """The cells of one family beside stored values of `transformers`; models write only if `write`."""
    reference = json.loads(STORED.read_text())
    reference["written"] = reference["written"] if write else None
    directory = make_model(reference["family"], folder / "model", written_end=reference["written end"])
    return list(cells(directory, folder, reference, routes))


def main() -> None:
    """Print the table, and exit with 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"default: {' '.join(FAMILIES)}")
    parser.add_argument("--store", action="store_true", help="write the stored values of one family and stop")
    args = parser.parse_args()
    if args.store:
        with tempfile.TemporaryDirectory() as name:
            reference = texts.make_with_reference(STORED_FAMILY, Path(name) / "model")
        STORED.write_text(json.dumps(reference) + "\n")
        return
    results = {}
    for family in args.families or FAMILIES:
        results[family] = family_cells(family)
        print(f"{family}: {len(results[family])} cells", file=sys.stderr, flush=True)
    print(report(results))
    sys.exit(any(cell.status == "wrong" for cells in results.values() for cell in cells))


if __name__ == "__main__":
    main()
