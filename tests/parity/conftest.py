"""Comparisons with transformers' own models and tests on real weights: only where torch (the extra `parity`) and the
weights are. `.ci/run` fetches both."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models"), str(HERE.parent / "rollout")]

from minilm import minilm  # noqa: E402
from smollm2 import smollm2  # noqa: E402

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
if minilm() is None:
    collect_ignore_glob.append("test_minilm.py")
if smollm2() is None:
    collect_ignore_glob += ["test_smollm2.py", "test_rollout_smollm2.py"]
