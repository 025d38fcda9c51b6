"""How benchmarks report: JSON on stdout, and in a file when asked."""

import json
import os
import platform
from pathlib import Path
from typing import Any


def write_report(numbers: dict[str, Any], path: str | None) -> None:
    """Prints `numbers` with the machine they were taken on, floats to five digits; writes them to `path` if given."""
    report = _rounded({**numbers, "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "load": os.getloadavg()}})
    text = json.dumps(report, indent=1)
    print(text, flush=True)
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
