"""Comparisons with transformers' own models and tests on real weights: only where torch (the extra `parity`) and the
weights are. `.ci/run` fetches both."""

import importlib.util

from minilm import minilm
from smollm2 import smollm2

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
if minilm() is None:
    collect_ignore_glob.append("test_minilm.py")
if smollm2() is None:
    collect_ignore_glob += ["test_smollm2.py", "test_rollout_smollm2.py"]
