"""Convert the deaths of a run's processes into incidents that state the cause, the replacement and the cost."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

PROCESSES = "processes.jsonl"
_DEATHS = ("exited", "frozen", "lost")
_NOTICES = ("set-aside", "reduced", "stopped")


def process_incidents(records: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return an incident for each death that ended an attempt, and for each notice.

    Args:
        records: Records of `processes.jsonl`: `time, attempt, rank, host, pid, event, reason`.

    Returns:
        Objects with `time`, `rule` and `message`.
    """
    incidents: list[dict[str, str]] = []
    death: dict[str, str] | None = None
    for record in records:
        event, time = str(record.get("event", "")), str(record.get("time", ""))
        if event in _DEATHS and record.get("reason") != "finished":
            if death is None:
                process = f"rank {record.get('rank')} on {record.get('host')}, process {record.get('pid')}"
                death = {"time": time, "rule": event, "message": f"{process}: {record.get('reason')}"}
                incidents.append(death)
        elif event == "replaced" and death is not None:
            death["message"] += f"; {record.get('host')} replaces it"
        elif event == "stepping" and death is not None:
            seconds = _seconds(death["time"], time)
            cost = "" if seconds is None else f" after {seconds:.1f} s"
            death["message"] += f"; training resumed{cost}, {record.get('reason')}"
            death = None
        elif event in _NOTICES:
            host = f"{record['host']}: " if record.get("host") else ""
            incidents.append({"time": time, "rule": event, "message": f"{host}{record.get('reason')}"})
    return incidents


def _seconds(begin: str, end: str) -> float | None:
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except (ValueError, TypeError):
        return None
