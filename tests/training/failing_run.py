"""A tiny training run whose policy was taught to search, through the HTTP retriever: `failing_run.py RUN_DIR URL`."""

import functools
import sys

import jax
import tiny_run

from cipo_jax.data.demonstrations import Demonstration, Turn
from cipo_jax.data.names import ALL_NAMES
from cipo_jax.data.questions import Question
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.distributed.mesh import mesh
from cipo_jax.learning.state import adamw
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.http import HttpRetriever
from cipo_jax.retrieval.retriever import Passage
from cipo_jax.rollout.engine import RolloutConfig
from cipo_jax.training.loop import Run, train
from cipo_jax.training.progress import Progress
from cipo_jax.training.run_dir import open_run_dir
from cipo_jax.training.step import Method
from cipo_jax.training.task import Task
from cipo_jax.training.warm_start import WarmStartConfig

STEPS, TIMEOUT_S = 32, 0.3
QUESTIONS = [Question(f"q{i}", f"capital of {name}", (ALL_NAMES[-1 - i],)) for i, name in enumerate(ALL_NAMES[:8])]


def demonstration(question: Question) -> Demonstration:
    """Searches for the question's text, then answers."""
    search = Turn(f"<search> {question.question} </search>", (Passage(0, "0", "", question.golds[0]),))
    return Demonstration(question.question, (search, Turn(f"<answer> {question.golds[0]} </answer>")))


def build_run(url: str) -> Run:
    """The run; without retries, so that every misbehaviour of the server is one failed search."""
    retriever = HttpRetriever(url, timeout_s=TIMEOUT_S, retries=0, breaker_failures=10**6)
    task = Task(
        protocol=SearchR1(build_tokenizer(), instruction="Question: {question}\n"),
        retrievers={"default": retriever},
        train=QUESTIONS[:4],
        validation=QUESTIONS[4:],
        reported={"held out": QUESTIONS[4:]},
        demonstrations=lambda top_k: [[demonstration(q) for q in QUESTIONS]],
    )
    return Run(
        task=lambda: task,
        decoder=tiny_run.DECODER,
        rollout=RolloutConfig(
            max_turns=1, top_k=2, prompt_tokens=16, action_tokens=12, observation_tokens=48, total_tokens=96,
            query_tokens=12, chunk=16,
        ),
        method=Method(questions=4, samples=2, minibatches=1, optimizer=functools.partial(adamw, learning_rate=1e-4)),
        warm_start=WarmStartConfig(
            steps=(120,), batch=8, lengths=(64,), observation_tokens=48,
            optimizer=functools.partial(adamw, learning_rate=1e-2),
        ),
        steps=STEPS,
        eval_every=STEPS,
        eval_batch=8,
        sample_count=1,
        mesh=functools.partial(mesh, devices=jax.devices()[:1]),
    )  # fmt: skip


if __name__ == "__main__":
    run_dir, url = sys.argv[1:]
    train(build_run(url), lambda: open_run_dir(run_dir, config_text="a run whose searches fail"), Progress())
