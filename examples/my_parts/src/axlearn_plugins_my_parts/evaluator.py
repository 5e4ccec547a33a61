"""The component `parameter-norms`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from axlearn_core.extend import Periodic, global_norm, node, select

if TYPE_CHECKING:
    from axlearn_core.extend import Session


class ParameterNorms(Periodic):
    """The norm of each parameter: `<name>_<path>`, and of all together: `<name>_total`."""

    @node
    class Config(Periodic.Config["ParameterNorms"]):
        """`pattern`: which parameters, by dotted path (`**.norm.*`)."""

        pattern: str = "**"

    def __init__(self, cfg: Config, *, name: str):
        super().__init__(cfg, name=name)
        self.pattern = cfg.pattern

    def run(self, session: "Session") -> Mapping[str, float]:
        """The norms now. Raises `RequestError` where the pattern fits nothing."""
        params = session.state.params
        parameters = {
            path: params[path] for path in select(self.pattern, params, setting=f"evaluators.{self.name}.pattern")
        }
        norms = {f"{self.name}_{path}": float(global_norm(x)) for path, x in parameters.items()}
        return norms | {f"{self.name}_total": float(global_norm(parameters))}
