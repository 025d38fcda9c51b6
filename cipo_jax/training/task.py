"""What an agent is trained and judged on: questions, the passages they search, and how the agent talks."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from cipo_jax.data.demonstrations import Demonstration
from cipo_jax.data.questions import Question
from cipo_jax.data.splits import SyntheticTask
from cipo_jax.data.tokenizer import build_tokenizer
from cipo_jax.data.warm_start import WarmStartMix, warm_start_demonstrations
from cipo_jax.data.world import World
from cipo_jax.protocols.base import Protocol
from cipo_jax.protocols.search_r1 import SearchR1
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.retrieval.retriever import Retriever


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything about the job but the policy.

    Attributes:
      protocol: how the agent talks; holds the tokenizer.
      retrievers: by corpus name.
      train: RL questions.
      validation: what checkpoints are selected on; never reported.
      reported: question sets of the final table, by stratum; the first one is the headline.
      worlds: synthetic worlds by corpus name, for judging what an agent did; empty for real corpora.
      demonstrations: writes the warm start's phases (lists of demonstrations), given passages per search.
      memory: the world the warm start teaches, if there is one.
    """

    protocol: Protocol
    retrievers: Mapping[str, Retriever]
    train: Sequence[Question]
    validation: Sequence[Question]
    reported: Mapping[str, Sequence[Question]]
    worlds: Mapping[str, World] = dataclasses.field(default_factory=dict)
    demonstrations: Callable[[int], Sequence[Sequence[Demonstration]]] | None = None
    memory: World | None = None

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.protocol.tokenizer


class WorldRetrievers(Mapping[str, Retriever]):
    """One retriever per synthetic world, built when it is first asked for."""

    def __init__(self, worlds: Mapping[str, World], build: Callable[[ListCorpus], Retriever]):
        self._worlds, self._build = worlds, build
        self._built: dict[str, Retriever] = {}

    def __getitem__(self, name: str) -> Retriever:
        if name not in self._built:
            self._built[name] = self._build(ListCorpus(self._worlds[name].corpus))
        return self._built[name]

    def __iter__(self):
        return iter(self._worlds)

    def __len__(self) -> int:
        return len(self._worlds)


@gin.configurable
def synthetic_task(
    world: SyntheticTask = gin.REQUIRED,
    mix: WarmStartMix = gin.REQUIRED,
    protocol: Callable[..., Protocol] = SearchR1,
    retriever: Callable[[ListCorpus], Retriever] = sparse_retriever,
) -> Task:
    """The two-hop synthetic task (`data/splits.py`), one small index per world.

    Args:
      world: seeds and sizes.
      mix: what the warm start demonstrates.
      protocol: called with the tokenizer.
      retriever: called with a world's corpus.
    """
    rl, validation, reported, warm = world.rl(), world.validation(), world.reported(), world.warm_start()
    worlds = {name: w for part in (rl, validation, warm, *reported.values()) for name, w in part.worlds.items()}
    retrievers = WorldRetrievers(worlds, retriever)

    def demonstrations(top_k: int) -> Sequence[Sequence[Demonstration]]:
        return warm_start_demonstrations(
            world, mix, lambda corpus, query: retrievers[corpus].retrieve([query], top_k)[0]
        )

    return Task(
        protocol=protocol(build_tokenizer()),
        retrievers=retrievers,
        train=rl.questions,
        validation=validation.questions,
        reported={stratum: part.questions for stratum, part in reported.items()},
        worlds=worlds,
        demonstrations=demonstrations,
        memory=world.memory(),
    )
