"""Retrievers around retrievers: cache, fusion, BM25, corruption."""

import threading

import pytest

from cipo_jax.errors import UserError
from cipo_jax.retrieval.cache import CachedRetriever
from cipo_jax.retrieval.corpus import ListCorpus
from cipo_jax.retrieval.corruption import (
    CorruptedRetriever,
    Corruption,
    corrupt,
    load_corruptions,
    save_corruptions,
    substitute,
)
from cipo_jax.retrieval.dense import sparse_retriever
from cipo_jax.retrieval.fusion import FusedRetriever
from cipo_jax.retrieval.lexical import Bm25Retriever
from cipo_jax.retrieval.retriever import Passage, RetrievalError, Retriever

CORPUS = ListCorpus(
    [
        {"title": "France", "text": "The capital of France is Paris, said Paris Hilton."},
        {"title": "Norway", "text": "The capital of Norway is Oslo."},
        {"title": "Paris", "text": "Parisian cafes line the river Seine."},
        {"title": "Fox", "text": "A quick brown fox jumps."},
        {"title": "Seine", "text": "The Seine is a river in France."},
    ]
)


class Scripted:
    """A retriever that answers from a table and logs its calls."""

    def __init__(self, table):
        self.table, self.calls = table, []

    def retrieve(self, queries, top_k):
        self.calls.append((list(queries), top_k))
        if "fail" in queries:
            raise RetrievalError("asked to", "status")
        return [[CORPUS.passage(row) for row in self.table.get(q, [])[:top_k]] for q in queries]

    def passage(self, row):
        return CORPUS.passage(row)


def _rows(found):
    return [p.row for p in found]


def test_all_are_retrievers(tmp_path):
    save_corruptions([], tmp_path / "list.jsonl")
    inner = Scripted({})
    wrapped = [CachedRetriever(inner), FusedRetriever([inner]), CorruptedRetriever(inner, str(tmp_path / "list.jsonl"))]
    for retriever in (inner, *wrapped, Bm25Retriever(CORPUS), sparse_retriever(CORPUS)):
        assert isinstance(retriever, Retriever)
        assert retriever.passage(3).title == "Fox"


def test_cache_answers_repeats_and_forgets_the_oldest():
    inner = Scripted({"a": [0], "b": [1], "c": [2]})
    cache = CachedRetriever(inner, capacity=2)
    assert [_rows(f) for f in cache.retrieve(["a", "b", "a"], 1)] == [[0], [1], [0]]
    assert inner.calls == [(["a", "b"], 1)]
    assert [_rows(f) for f in cache.retrieve(["a"], 1)] == [[0]]  # a is now the youngest
    cache.retrieve(["c"], 1)  # b goes
    assert len(cache) == 2
    cache.retrieve(["a", "b"], 1)
    assert inner.calls[1:] == [(["c"], 1), (["b"], 1)]
    cache.retrieve(["b"], 2)  # another top_k is another answer
    assert inner.calls[-1] == (["b"], 2)
    assert (cache.hits, cache.misses) == (3, 5)
    with pytest.raises(UserError, match="capacity=0"):
        CachedRetriever(inner, capacity=0)


def test_cached_answers_cannot_be_changed_from_outside():
    cache = CachedRetriever(Scripted({"a": [0]}))
    cache.retrieve(["a"], 1)[0].clear()
    assert _rows(cache.retrieve(["a"], 1)[0]) == [0]


def test_cache_does_not_remember_failures():
    inner = Scripted({})
    cache = CachedRetriever(inner)
    for _ in range(2):
        with pytest.raises(RetrievalError):
            cache.retrieve(["fail"], 1)
    assert len(inner.calls) == 2 and len(cache) == 0


def test_cache_holds_under_threads():
    cache = CachedRetriever(Scripted({str(i): [i % 5] for i in range(50)}), capacity=7)
    wrong = []

    def work(seed):
        for i in range(300):
            q = str((i * seed) % 50)
            if _rows(cache.retrieve([q], 1)[0]) != [int(q) % 5]:
                wrong.append(q)

    threads = [threading.Thread(target=work, args=(s,)) for s in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(cache) <= 7 and cache.hits + cache.misses == 1200


def test_fusion_by_hand():
    a, b = Scripted({"q": [0, 1, 2]}), Scripted({"q": [2, 0, 4]})
    found = FusedRetriever([a, b], constant=60).retrieve(["q", "none"], 3)
    assert found[1] == []
    # row 0: 1/61 + 1/62, row 2: 1/63 + 1/61, row 1: 1/62, row 4: 1/63
    assert _rows(found[0]) == [0, 2, 1]
    assert [p.score for p in found[0]] == pytest.approx([1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62])
    assert a.calls == [(["q", "none"], 100)]
    tied = FusedRetriever([Scripted({"q": [3, 1]}), Scripted({"q": [1, 3]})]).retrieve(["q"], 2)[0]
    assert _rows(tied) == [1, 3]
    assert _rows(FusedRetriever([a, b], weights=[0, 1]).retrieve(["q"], 2)[0]) == [2, 0]
    with pytest.raises(UserError, match="one weight for each of 2"):
        FusedRetriever([a, b], weights=[1])
    with pytest.raises(UserError, match="empty"):
        FusedRetriever([])


def test_bm25_ranks_words_and_reloads(tmp_path):
    for retriever in (Bm25Retriever(CORPUS, str(tmp_path / "bm25")), Bm25Retriever(CORPUS, str(tmp_path / "bm25"))):
        found = retriever.retrieve(["capital of Norway", "river Seine", "zzz unknown", "", "the of"], 3)
        assert _rows(found[0])[0] == 1 and _rows(found[1])[:2] == [4, 2]
        assert found[2] == found[3] == found[4] == []
        assert all(p.score > 0 for p in found[0])
        assert retriever.retrieve(["fox"], 99)[0][0].row == 3
    with pytest.raises(UserError, match="holds a BM25 index"):
        Bm25Retriever(CORPUS, str(tmp_path / "bm25"), k1=1.2)


def test_bm25_score_by_hand():
    corpus = ListCorpus([{"text": "red fox"}, {"text": "red red sea"}, {"text": "blue"}])
    found = Bm25Retriever(corpus, k1=0.9, b=0.4).retrieve(["red"], 3)[0]
    # Lucene: ln(1 + (N - n + .5) / (n + .5)) * tf / (tf + k1 (1 - b + b len / mean)); N = 3, n = 2, mean length 2
    idf = 0.4700036292
    assert _rows(found) == [1, 0]
    assert found[0].score == pytest.approx(idf * 2 / (2 + 0.9 * (0.6 + 0.4 * 3 / 2)), rel=1e-5)
    assert found[1].score == pytest.approx(idf * 1 / (1 + 0.9 * (0.6 + 0.4 * 2 / 2)), rel=1e-5)


@pytest.mark.parametrize(
    "text, golds, expected",
    [
        ("Paris, paris and Parisian.", ["Paris"], "Oslo, Oslo and Parisian."),
        ("New York City and York", ["York", "New York City"], "Oslo and Oslo"),
        ("a+b=c", ["a+b"], "Oslo=c"),
        ("nothing", ["", " "], "nothing"),
        ("1999-2000", ["1999"], "Oslo-2000"),
    ],
)
def test_substitute(text, golds, expected):
    assert substitute(text, golds, "Oslo") == expected


QUESTIONS = [
    ("q1", "capital of France", ["Paris"], "city"),
    ("q2", "capital of Norway", ["Oslo"], "city"),
    ("q3", "what jumps", ["brown fox"], "animal"),
]


def test_corruption_end_to_end(tmp_path):
    retriever = sparse_retriever(CORPUS)
    made = corrupt(QUESTIONS, retriever, depth=5, seed=0)
    assert [c.question_id for c in made] == ["q1", "q2"]  # nothing of q3's type can stand for a fox
    assert made == corrupt(QUESTIONS, retriever, depth=5, seed=0)
    assert made[0].wrong == "Oslo" and [row for row, _, _ in made[0].passages] == [0, 2]
    path = tmp_path / "list.jsonl"
    save_corruptions(made, path)
    assert load_corruptions(path) == made
    false = CorruptedRetriever(retriever, str(path))
    true_found = retriever.retrieve(["capital of France"], 3)[0]
    found = false.retrieve(["capital of France"], 3)[0]
    assert [(p.row, p.score) for p in found] == [(p.row, p.score) for p in true_found]
    shown = {p.row: p for p in found}
    assert shown[0].text == "The capital of France is Oslo, said Oslo Hilton."
    assert false.passage(1).text == "The capital of Norway is Paris."
    assert false.passage(2).title == "Oslo" and false.passage(3) == CORPUS.passage(3)
    assert false.replaced == sum(p.row in (0, 1, 2) for p in found) > 0


def test_passages_are_corrupted_for_one_question_only():
    twice = [*QUESTIONS[:2], ("q4", "capital of France again", ["Paris"], "city")]
    rows = [row for c in corrupt(twice, sparse_retriever(CORPUS), depth=5) for row, _, _ in c.passages]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("{", ":2: not a corruption"),
        ('{"question_id": "q"}', ":2: not a corruption"),
        ('{"question_id": "q", "golds": [], "wrong": "x", "passages": [[0, "t", "u"]]}', ":2: row 0 is already"),
    ],
)
def test_broken_corruption_lists_name_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "list.jsonl"
    save_corruptions([Corruption("q0", ("g",), "w", ((0, "t", "u"),))], path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=complaint):
        load_corruptions(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_corruptions(tmp_path / "none")


def test_passage_contents_doubles_quotes():
    assert Passage(0, "0", 'The "X" files', "text").contents == '"The ""X"" files"\ntext'
    assert Passage(0, "0", "", "text").contents == "text"
