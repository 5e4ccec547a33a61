"""Formatting of durations."""


def clock(seconds: float) -> str:
    """Format a duration as `m:ss` or `h:mm:ss`."""
    minutes, remainder = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"
