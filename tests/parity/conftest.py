"""Live comparisons with transformers' own models: only where torch is (the extra `parity`)."""

import importlib.util
import sys
from pathlib import Path

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models")]
