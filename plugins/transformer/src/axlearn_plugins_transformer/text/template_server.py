"""Renders chat templates in a process of its own: `python -P template_server.py BYTES`.

The first line of standard input is {"source"}, and is answered with {}. Each other one is {"variables", "today"}, and is answered
with {"text"}, {"error"} or, if the template itself is wrong, {"syntax", "line"}. The process may take BYTES of memory; the time is
watched from outside. Imports Jinja and nothing of this framework, to start fast.
"""

import datetime
import json
import os
import resource
import sys
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode noncharacters: no text has them. They stand where an answer begins and ends.
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
    """The time that templates are told.

    Attributes:
        today: a fixed date, YYYY-MM-DD; None is the time of the call.
    """

    today: str | None = None

    def strftime(self, format: str) -> str:
        """The time in the given format, as `strftime_now` of `transformers`."""
        now = datetime.datetime.now() if self.today is None else datetime.date.fromisoformat(self.today)
        return now.strftime(format)


def compile_template(source: str, clock: Clock | None = None) -> jinja2.Template:
    """Compile a template in Jinja's sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": (clock or Clock()).strftime}
    return environment.from_string(source)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what the assistant says."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja has it

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
    """As templates of Hugging Face expect it: without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=False, indent=indent, **{k: v for k, v in options.items() if k != "ensure_ascii"}
    )


def main() -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = json.loads(sys.stdin.readline())
    template, wrong, clock = None, None, Clock()
    try:
        template = compile_template(first["source"], clock)
    except jinja2.TemplateSyntaxError as error:
        wrong = {"syntax": error.message or "", "line": error.lineno}
    except FAILURES as error:
        wrong = {"syntax": f"{type(error).__name__}: {error}", "line": 1}
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        if template is None:
            answer = wrong
        else:
            try:
                request = json.loads(line)
                clock.today = request["today"]
                answer = {"text": template.render(request["variables"])}
            except MemoryError:
                answer = {"error": f"it takes more than {limit:,} bytes of memory"}
            except RecursionError:
                answer = {"error": "it calls itself too deeply"}
            except FAILURES as error:
                answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
