"""Renders chat templates in a separate process: `python -P template_server.py BYTES`.

The first line of standard input is {"source"}; the answer is {}. Each line after it is {"variables", "today"}; the answer is
{"text"}, {"error"}, or {"syntax", "line"} if the template itself is invalid. The process may use BYTES of memory. The parent
enforces the time limit. To start quickly, the module imports Jinja but nothing from this framework.
"""

import contextlib
import datetime
import json
import os
import resource
import sys
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode noncharacters, which do not occur in text. They mark the beginning and end of an answer.
BEGIN, END = "\ufdd0", "\ufdd1"
FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class Clock:
    """The clock of a template.

    Attributes:
        today: A fixed date, YYYY-MM-DD. None uses the current time.
    """

    today: str | None = None

    def strftime(self, format: str) -> str:
        """Format the time, like `strftime_now` of `transformers`."""
        now = datetime.datetime.now() if self.today is None else datetime.date.fromisoformat(self.today)
        return now.strftime(format)


def compile_template(source: str, clock: Clock | None = None) -> jinja2.Template:
    """Compile a template in Jinja's sandbox."""
    environment = _new_environment()
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": (clock or Clock()).strftime}
    return environment.from_string(source)


def _new_environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )


def parse_template(source: str) -> nodes.Template:
    """Parse a template. Raises `jinja2.TemplateSyntaxError` or `RecursionError` if it is invalid."""
    return _new_environment().parse(source)


def template_variables(*sources: str) -> frozenset[str]:
    """Return the names of the variables that templates read but do not set.

    A template with a syntax error has none; rendering reports the error.
    """
    names: set[str] = set()
    for source in sources:
        with contextlib.suppress(jinja2.TemplateError, RecursionError):
            names |= meta.find_undeclared_variables(parse_template(source))
    return frozenset(names)


class _Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  # Jinja requires this type

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark_answer"), [], [], body).set_lineno(line)

    @staticmethod
    def _mark_answer(caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Convert a value to JSON without HTML escapes, as Hugging Face templates expect."""
    return json.dumps(
        value, ensure_ascii=False, indent=indent, **{k: v for k, v in options.items() if k != "ensure_ascii"}
    )


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = json.loads(sys.stdin.readline())
    template, syntax_error, clock = None, None, Clock()
    try:
        template = compile_template(first["source"], clock)
    except jinja2.TemplateSyntaxError as error:
        syntax_error = {"syntax": error.message or "", "line": error.lineno}
    except FAILURES as error:
        syntax_error = {"syntax": f"{type(error).__name__}: {error}", "line": 1}
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        if template is None:
            answer = syntax_error
        else:
            try:
                request = json.loads(line)
                clock.today = request["today"]
                answer = {"text": template.render(request["variables"])}
            except MemoryError:
                answer = {"error": f"it uses more than {limit:,} bytes of memory"}
            except RecursionError:
                answer = {"error": "its recursion is too deep"}
            except FAILURES as error:
                answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
