"""The `parameter-norms` component."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from axlearn_core.extend import Periodic, global_norm, node, select

if TYPE_CHECKING:
    from axlearn_core.extend import Session


class ParameterNorms(Periodic):
    """Logs the norm of each parameter and of all parameters.

    The metrics are `<name>_<path>` and `<name>_total`.
    """

    @node
    class Config(Periodic.Config["ParameterNorms"]):
        """Settings for `ParameterNorms`.

        Attributes:
            pattern: Pattern of dotted parameter paths (`**.norm.*`).
        """

        pattern: str = "**"

    def __init__(self, cfg: Config, *, name: str):
        super().__init__(cfg, name=name)
        self.pattern = cfg.pattern

    def run(self, session: "Session") -> Mapping[str, float]:
        """Return the current norms. Raise `RequestError` if the pattern matches no parameter."""
        params = session.state.params
        parameters = {
            path: params[path] for path in select(self.pattern, params, setting=f"evaluators.{self.name}.pattern")
        }
        norms = {f"{self.name}_{path}": float(global_norm(x)) for path, x in parameters.items()}
        return norms | {f"{self.name}_total": float(global_norm(parameters))}
