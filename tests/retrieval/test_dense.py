"""The in-process retriever on a toy world like the synthetic ones."""

import subprocess
import sys

import numpy as np
import pytest

from cipo_jax.errors import UserError
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.dense import DenseRetriever, sparse_retriever
from cipo_jax.retrieval.embedding import SparseProjection
from cipo_jax.retrieval.index import VectorIndex

_SYLLABLES = ["ba", "do", "ki", "lu", "me", "na", "po", "ri", "su", "ta", "ve", "zo"]
_FACTS = {
    "capital": "The capital of {0} is {1}.",
    "currency": "The currency of {0} is {1}.",
    "river": "The river of {0} is {1}.",
    "mayor": "The mayor of {0} is {1}.",
}


def _name(rng: np.random.Generator) -> str:
    return "".join(rng.choice(_SYLLABLES, 3)).capitalize()


def toy_world(entities: int = 80, seed: int = 0):
    """Returns `(records, [(query, row), ...])`: four facts about each of 80 entities, 320 passages."""
    rng = np.random.default_rng(seed)
    names = sorted({_name(rng) for _ in range(3 * entities)})
    subjects = [str(n) for n in rng.permutation(names)[:entities]]
    records, queries = [], []
    for subject in subjects:
        for relation, template in _FACTS.items():
            # Objects are subjects too, as in two-hop worlds: "river of Ycity" after "capital of Xland is Ycity".
            value = subjects[rng.integers(entities)]
            queries.append((f"{relation} of {subject}", len(records)))
            records.append({"id": f"p{len(records)}", "title": subject, "text": template.format(subject, value)})
    order = rng.permutation(len(records))
    inverse = np.argsort(order)
    return [records[i] for i in order], [(query, int(inverse[row])) for query, row in queries]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dim", [256, 512])
def test_gold_passage_is_in_top_two(seed, dim):
    records, queries = toy_world(seed=seed)
    retriever = sparse_retriever(ListCorpus(records), dim=dim)
    results = retriever.retrieve([query for query, _ in queries], 2)
    hits = [row in [p.row for p in found] for (_, row), found in zip(queries, results)]
    assert len(hits) == 320
    assert np.mean(hits) >= 0.99
    first = [row == found[0].row for (_, row), found in zip(queries, results)]
    assert np.mean(first) >= 0.95


def test_ranking_equals_brute_force_with_ties_by_row():
    corpus = ListCorpus([{"text": t} for t in ("red fox", "blue fox", "red fox", "green tree", "red fox", "sea")])
    retriever = sparse_retriever(corpus)
    found = retriever.retrieve(["red fox"], 4)[0]
    assert [p.row for p in found] == [0, 2, 4, 1]
    assert found[0].score == pytest.approx(1.0, abs=1e-6)
    vectors = retriever.embedder.embed_queries(["red fox", "blue fox"])
    assert found[3].score == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-6)


def test_scores_do_not_depend_on_the_batch():
    records, queries = toy_world()
    retriever = sparse_retriever(ListCorpus(records))
    texts = [query for query, _ in queries[:70]]
    together = retriever.retrieve(texts, 5)
    assert [retriever.retrieve([text], 5)[0] for text in texts] == together


def test_shuffled_order_permutes_the_same_passages():
    records, queries = toy_world()
    corpus = ListCorpus(records)
    texts = [query for query, _ in queries]
    by_score = sparse_retriever(corpus).retrieve(texts, 3)
    embedder = SparseProjection().fit(p.contents for p in map(corpus.passage, range(len(corpus))))
    index = VectorIndex.from_embeddings(
        embedder.embed_passages([corpus.passage(r).contents for r in range(len(corpus))])
    )
    shuffled = DenseRetriever(corpus, embedder, index, order="shuffled", seed=7).retrieve(texts, 3)
    assert [sorted(p.row for p in found) for found in shuffled] == [sorted(p.row for p in f) for f in by_score]
    first = np.mean([a[0] == b[0] for a, b in zip(by_score, shuffled)])
    assert 0.2 < first < 0.47  # a third, +-5 standard deviations of 320 draws
    again = DenseRetriever(corpus, embedder, index, order="shuffled", seed=7).retrieve(texts[::-1], 3)[::-1]
    assert again == shuffled
    other = DenseRetriever(corpus, embedder, index, order="shuffled", seed=8).retrieve(texts, 3)
    assert other != shuffled


def test_equal_results_in_another_process():
    program = (
        "from cipo_jax.retrieval.corpus import ListCorpus\n"
        "from cipo_jax.retrieval.dense import sparse_retriever\n"
        "c = ListCorpus([{'text': t} for t in ('red fox', 'blue fox', 'green tree', 'sea')])\n"
        "r = sparse_retriever(c, order='shuffled', seed=3)\n"
        "print([(p.row, p.score.hex()) for q in ('red', 'fox sea') for p in r.retrieve([q], 3)[0]])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1 and outputs.pop().startswith("[(")


@pytest.mark.parametrize("query", ["", " ", "\x00", "x" * 10_000, "\udce9t\udce9", "zzz unseen", "🦊" * 50])
def test_hostile_queries_get_passages(query):
    retriever = sparse_retriever(ListCorpus([{"text": "red fox"}, {"text": "blue sea"}, {"text": "green"}]))
    found = retriever.retrieve([query], 2)[0]
    assert [p.row for p in found] == [0, 1]


def test_small_corpus_gives_fewer_than_top_k():
    retriever = sparse_retriever(ListCorpus([{"text": "red fox"}, {"text": "blue sea"}]))
    assert [len(f) for f in retriever.retrieve(["red", "sea"], 10)] == [2, 2]
    assert retriever.retrieve([], 3) == []
    assert retriever.retrieve(["red"], 0) == [[]]


def test_bad_arguments_are_user_errors():
    corpus = ListCorpus([{"text": "red"}, {"text": "blue"}])
    good = sparse_retriever(corpus)
    with pytest.raises(UserError, match="order='random'"):
        DenseRetriever(corpus, good.embedder, good.index, order="random")
    with pytest.raises(UserError, match="2 rows but the corpus 1"):
        DenseRetriever(ListCorpus([{"text": "red"}]), good.embedder, good.index)
    with pytest.raises(UserError, match="empty"):
        sparse_retriever(ListCorpus([]))
