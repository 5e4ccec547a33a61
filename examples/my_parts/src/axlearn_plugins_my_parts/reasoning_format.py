"""The `plan-tags` reasoning parser."""

from axlearn_plugins_serving.parsers.think import MarkedReasoning


class PlanTags(MarkedReasoning):
    """`<plan>...</plan>`."""

    start = "<plan>"
    stop = "</plan>"

    def matches(self, template: str) -> bool:
        """Return True if models with this chat template write such tags."""
        return self.stop in template
