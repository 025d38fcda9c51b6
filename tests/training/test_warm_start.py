"""The warm start: order of batches, resuming, and its entry point on a file of trajectories."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny_run
from absl.testing import flagsaver

from cipo_jax import cli
from cipo_jax import warm_start as entry
from cipo_jax.data.demonstrations import TokenRecord, save_demonstrations
from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.data.warm_start import WarmStartMix, warm_start_demonstrations
from cipo_jax.distributed.mesh import mesh
from cipo_jax.errors import UserError
from cipo_jax.learning.state import adamw
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.training.checkpoints import Checkpoints, abstract_like
from cipo_jax.training.policy import Policy
from cipo_jax.training.run_dir import CONFIG
from cipo_jax.training.warm_start import Batches, WarmStartConfig, supervised_learner, warm_start
from cipo_jax.types import Role


def record(number: int, length: int) -> TokenRecord:
    """Tokens that tell which record they are from: a prompt of one token, then an action."""
    return TokenRecord([number] * length, [Role.PROMPT] + [Role.ACTION] * (length - 1), [-1] + [0] * (length - 1))


def test_batches_follow_the_phases_and_hold_one_length_each():
    short, long = [record(i, 5) for i in range(6)], [record(10 + i, 9) for i in range(4)]
    config = WarmStartConfig(steps=(5, 3), batch=2, lengths=(6, 12), seed=1)
    batches = Batches(((*short, *long), long), config)
    seen = [batches[step] for step in range(8)]
    with pytest.raises(IndexError):
        batches[8]
    for batch in seen:
        widths = {6: set(range(6)), 12: set(range(10, 14))}
        assert set(batch.tokens[:, 0].tolist()) <= widths[batch.tokens.shape[1]]
        for row, length in enumerate(batch.length):
            assert batch.action_mask[row].tolist() == [
                False,
                *[True] * (length - 1),
                *[False] * (batch.tokens.shape[1] - length),
            ]
            assert batch.turn[row].tolist() == [-1, *[0] * (length - 1), *[-1] * (batch.tokens.shape[1] - length)]
    first = [int(x) for batch in seen[:5] for x in batch.tokens[:, 0]]
    assert sorted(first) == [*range(6), *range(10, 14)]  # an epoch of the first phase, each once
    assert all(x >= 10 for batch in seen[5:] for x in batch.tokens[:, 0])
    again = Batches(((*short, *long), long), config)
    np.testing.assert_array_equal(again[3].tokens, seen[3].tokens)
    other = Batches(((*short, *long), long), dataclasses.replace(config, seed=2))
    assert any(not np.array_equal(other[i].tokens, seen[i].tokens) for i in range(5))


def test_a_short_last_batch_is_filled_with_its_own_length():
    batches = Batches(([record(i, 4) for i in range(5)],), WarmStartConfig(steps=(2,), batch=4, lengths=(4,)))
    counts = np.bincount([int(x) for step in range(2) for x in batches[step].tokens[:, 0]], minlength=5)
    assert counts.min() == 1 and counts.sum() == 8


@pytest.mark.parametrize(
    ("phases", "steps", "told"),
    [
        ([[record(0, 4)]], (2, 2), "names 2 phases, the demonstrations have 1"),
        ([[record(0, 4)], []], (2, 2), "wants 2 updates on phase 1, which has no demonstration"),
        ([[record(0, 99)]], (2,), "a demonstration has 99 tokens, more than WarmStartConfig.lengths=(8,)"),
    ],
)
def test_phases_that_cannot_be_taught(phases, steps, told):
    with pytest.raises(UserError, match=told.replace("(", r"\(").replace(")", r"\)")):
        Batches(phases, WarmStartConfig(steps=steps, batch=2, lengths=(8,)))


WORLD = SyntheticTask(seed=1, warm_start_worlds=1, rl_worlds=1)
TEACHING = WarmStartConfig(
    steps=(24, 8),
    batch=8,
    lengths=(192,),
    checkpoint_every=10,
    optimizer=lambda: adamw(learning_rate=1e-2, b2=0.98),
)


@pytest.fixture(scope="module")
def setting():
    """A small policy, its learner, and demonstrations of the synthetic task."""
    retrievers = {name: sparse_retriever(ListCorpus(world.corpus)) for name, world in WORLD.warm_start().worlds.items()}
    phases = warm_start_demonstrations(
        WORLD, WarmStartMix(copying=48, mixture=16), lambda corpus, query: retrievers[corpus].retrieve([query], 2)[0]
    )
    policy = Policy(tiny_run.DECODER, mesh(devices=jax.devices()[:1]))
    protocol = SearchR1(build_tokenizer(), instruction="Question: {question}\n")
    learner = supervised_learner(policy, TEACHING)

    def teach(path=None, stop=None, phases=phases):
        if path is None:
            return warm_start(policy, learner, phases, protocol, TEACHING, seed=0)
        with Checkpoints(path, keep=1) as checkpoints:
            return warm_start(policy, learner, phases, protocol, TEACHING, seed=0, checkpoints=checkpoints, stop=stop)

    return SimpleNamespace(policy=policy, learner=learner, phases=phases, protocol=protocol, teach=teach)


@pytest.fixture(scope="module")
def taught(setting):
    return setting.teach()


class StopAfter:
    """Asks to stop at the n-th poll."""

    def __init__(self, polls: int):
        self.polls = polls

    def requested(self) -> bool:
        self.polls -= 1
        return self.polls <= 0


def assert_equal(a, b):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def test_a_stopped_one_continues_to_the_same_bits(setting, taught, tmp_path):
    assert setting.teach(tmp_path, StopAfter(13)) is None
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps == [13]
    state = setting.teach(tmp_path)
    assert int(state.step) == sum(TEACHING.steps)
    assert_equal(state, taught)
    assert_equal(setting.teach(tmp_path, phases=()), taught)  # finished: nothing is needed to read it


def test_other_demonstrations_do_not_continue_it(setting, tmp_path):
    setting.teach(tmp_path, StopAfter(2))
    copying, mixture = setting.phases
    with pytest.raises(UserError, match="was taught by other demonstrations; choose another --run_dir"):
        setting.teach(tmp_path, phases=(copying[1:], mixture))


def flags(run_dir, path, *bindings):
    given = tiny_run.arguments(
        run_dir, "WarmStartConfig.steps = (8, 4)", "WarmStartConfig.checkpoint_every = 5", *bindings
    )
    return [*given, f"--demonstrations={path}"]


@pytest.fixture
def run(capfd, clean_gin):
    """Runs the entry point in this process: exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as left:
            cli.run(entry.main, run_dir=True, argv=["warm_start", *arguments])
        return left.value.code, *capfd.readouterr()

    return run


def test_a_file_of_trajectories_is_learned(run, setting, tmp_path):
    path, run_dir = tmp_path / "demonstrations.jsonl", tmp_path / "run"
    save_demonstrations(path, setting.phases[0])
    code, out, err = run(*flags(run_dir, path, "mesh.fsdp = 8"))
    assert code == 0, err
    assert "48 demonstrations" in out and "warm start 12/12" in out and str(run_dir / "warm_start") in out
    like = setting.learner.init(setting.policy.init(0))
    with Checkpoints(run_dir / "warm_start", read_only=True) as checkpoints:
        assert checkpoints.steps == [12]
        state, _ = checkpoints.restore(abstract_like(like))
    assert int(state.step) == 12 and (run_dir / CONFIG).exists()
    save_demonstrations(path, setting.phases[1])
    code, out, err = run(*flags(run_dir, path, "mesh.fsdp = 8"))
    assert code == 2 and "was taught by other demonstrations" in err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": "q", "turns": [', "not JSON"),
        ('{"question": "q", "turns": []}', "turns=[] is not a non-empty list; give at least one action."),
        (json.dumps({"question": "long " * 300, "turns": [{"action": "a"}]}), "add a length of at least "),
    ],
)
def test_a_broken_line_is_told_with_its_file_and_number(run, setting, tmp_path, line, told):
    path, run_dir = tmp_path / "demonstrations.jsonl", tmp_path / "run"
    save_demonstrations(path, setting.phases[0][:2])
    path.write_text(path.read_text() + "\n" + line + "\n")
    code, out, err = run(*flags(run_dir, path))
    assert code == 2 and not out
    assert err.startswith(f"error: {path}:4: ") and told in err and err.count("\n") == 1
    assert not run_dir.exists()


def test_the_file_must_be_named_and_help_shows_one(run, tmp_path):
    code, _, err = run(*tiny_run.arguments(tmp_path / "run"))
    assert code == 2 and err.startswith("error: --demonstrations is not set; name a JSON-lines file")
    text = cli.help_text(entry.__doc__, entry.__name__)
    assert "--demonstrations=DEMONSTRATIONS" in text and '"turns": [' in text
