"""Live comparisons with transformers' own models: only where torch is (the extra `parity`)."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models")]

from smollm2 import smollm2  # noqa: E402

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
if smollm2() is None:
    collect_ignore_glob.append("test_smollm2.py")
