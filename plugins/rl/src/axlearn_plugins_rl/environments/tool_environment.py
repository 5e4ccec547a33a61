"""`ToolEnvironment`: Python functions as tools of the policy."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pydantic

from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import RequestError
from axlearn_plugins_rl.environments.guarded_calls import CallFailedError, call_in_thread, guard_call
from axlearn_plugins_rl.rollout_contracts import Episode, Example, Message, Reply


class ToolEnvironment(Configurable):
    """An `Environment` whose episodes offer Python functions as tools. An answer without calls ends an episode.

    Subclasses set `functions` or override `bind`, and are registered as components. A function may be async. Its name, its
    signature and its docstring become the description that the model reads. Arguments that do not fit the signature, and errors
    that a function raises, are answered with a message that begins with `error:`, so that the policy can try again.

    Attributes:
        functions: The functions.
    """

    @node
    class Config(Configurable.Config["ToolEnvironment"]):
        """Limits.

        Attributes:
            call_limit: Maximum duration of a call of a function, in seconds.
            max_length: Maximum number of characters of a result. Longer results are cut.
        """

        call_limit: float = setting(default=10.0, gt=0)
        max_length: int = setting(default=10_000, ge=1)

    config: Config
    functions: ClassVar[Sequence[Callable[..., Any]]] = ()

    def __init__(self, cfg: Config):
        self.config = cfg

    def bind(self, example: Example, seed: int) -> Sequence[Callable[..., Any]]:
        """Return the functions of an episode (default: `functions`).

        Args:
            example: The example.
            seed: Seed of the episode. Equal seeds must give functions that return equal results.
        """
        return self.functions

    async def start(self, example: Example, *, seed: int) -> Episode:
        """See `Environment.start`."""
        tools = [_Tool.describe(function) for function in self.bind(example, seed)]
        if not tools:
            raise RequestError(f"{type(self).__name__} has no functions\n    fix: set functions, or override bind")
        return _ToolEpisode(self.config, {tool.name: tool for tool in tools})


class _ToolEpisode:
    """An episode with tools.

    Attributes:
        tools: Descriptions of the tools.
        metrics: Number of calls, and number of calls that failed.
    """

    def __init__(self, cfg: ToolEnvironment.Config, tools: Mapping[str, "_Tool"]):
        self._config, self._tools = cfg, tools
        self.tools = tuple(tool.description for tool in tools.values())
        self.metrics = {"tool_calls": 0.0, "tool_errors": 0.0}

    async def reply(self, message: Message) -> Reply:
        """Call the functions that a message names, one after another."""
        calls = message.get("tool_calls") or ()
        return Reply(messages=tuple([await self._answer(call) for call in calls]), done=not calls)

    async def close(self) -> None:
        """Do nothing. An episode holds no resources."""

    async def _answer(self, call: Mapping[str, Any]) -> Message:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self.metrics["tool_calls"] += 1
        try:
            result = await self._call(name, arguments)
        except CallFailedError as error:
            self.metrics["tool_errors"] += 1
            result = f"error: {error}"
        if len(result) > self._config.max_length:
            result = f"{result[: self._config.max_length]}... ({len(result):,} characters)"
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}

    async def _call(self, name: str, arguments: str) -> str:
        if (tool := self._tools.get(name)) is None:
            raise CallFailedError(f"unknown tool {name!r}; the tools are {', '.join(self._tools)}")
        try:
            values = tool.arguments.model_validate_json(arguments or "{}")
        except pydantic.ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            raise CallFailedError("; ".join(problems)) from None
        keywords = {field: value for field, value in values if field in tool.parameters}
        result = await guard_call(tool.run(keywords), name, self._config.call_limit)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


@attrs.frozen(kw_only=True)
class _Tool:
    """A function that the policy may call.

    Attributes:
        name: Name of the function.
        function: The function.
        arguments: Model of its arguments.
        parameters: Names of its parameters.
        description: Its description, in the form of the chat API.
    """

    name: str
    function: Callable[..., Any]
    arguments: type[pydantic.BaseModel]
    parameters: frozenset[str]
    description: Mapping[str, Any]

    @classmethod
    def describe(cls, function: Callable[..., Any]) -> "_Tool":
        """Return the tool of a function.

        Raises:
            RequestError: If a parameter has no name in calls, or no type.
        """
        name, fields = function.__name__, {}
        signature = inspect.signature(function, eval_str=True)
        for parameter in signature.parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise RequestError(
                    f"the tool {name} has the parameter {parameter}\n    expected: named parameters only"
                )
            if parameter.annotation is parameter.empty:
                raise RequestError(
                    f"the parameter {parameter.name} of the tool {name} has no type\n    fix: annotate it"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (parameter.annotation, default)
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        model = pydantic.create_model(name, __config__=config, **fields)
        schema = {key: value for key, value in model.model_json_schema().items() if key != "title"}
        schema["properties"] = {
            field: {key: value for key, value in facts.items() if key != "title"}
            for field, facts in schema.get("properties", {}).items()
        }
        facts = {"name": name, "description": inspect.getdoc(function) or "", "parameters": schema}
        return cls(
            name=name,
            function=function,
            arguments=model,
            parameters=frozenset(fields),
            description={"type": "function", "function": facts},
        )

    async def run(self, keywords: Mapping[str, Any]) -> Any:
        """Call the function, in a thread unless it is async."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**keywords)
        return await call_in_thread(lambda: self.function(**keywords))
