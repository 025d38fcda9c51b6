"""Text embeddings that need no model: hashed words, idf weights, a sparse random projection.

Good enough for synthetic worlds and tests, where words match exactly; real corpora use the BERT encoder.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import gin
import numpy as np

from cipo_jax.errors import UserError

_WORD = re.compile(r"\w+")
_NONZEROS = 16  # coordinates per word: 64 digest bytes / 4


class Embedder(Protocol):
    """Maps texts to unit vectors whose inner product ranks passages for queries."""

    dim: int

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Returns `[len(texts), dim]` float32. A row's bits do not depend on the other texts."""
        ...

    def embed_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Returns `[len(texts), dim]` float32."""
        ...

    def warm_up(self) -> None:
        """Compiles whatever `embed_queries` may need, so that no search has to wait for it."""
        ...


def words(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


@gin.configurable
class SparseProjection:
    """Bag of words in a random subspace.

    A word's vector has 16 coordinates of +-1/4, drawn from a keyed BLAKE2b digest of the word, so it is the same in
    every process. A text is the sum over its words of `(1 + ln tf) * min(ln(1 + N / df), idf_clip)` times the word's
    vector, scaled to unit length. Words that `fit` did not see have weight 0.

    Args:
      dim: size of the embedding.
      idf_clip: upper bound of a word's inverse document frequency (nats). A small bound keeps a rare entity name from
        drowning the relation words that tell its passages apart.
      seed: another seed is another projection.
    """

    def __init__(self, dim: int = 512, idf_clip: float = 2.0, seed: int = 0):
        if dim < 1:
            raise UserError(f"SparseProjection.dim={dim} must be at least 1")
        if not idf_clip > 0:
            raise UserError(f"SparseProjection.idf_clip={idf_clip} must be positive")
        self.dim = dim
        self._idf_clip = idf_clip
        self._key = str(seed).encode()
        self._idf: dict[str, float] = {}
        self._vectors: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def fit(self, texts: Iterable[str]) -> "SparseProjection":
        """Counts in how many of `texts` each word occurs; returns itself."""
        documents, frequency = 0, Counter()
        for text in texts:
            documents += 1
            frequency.update(set(words(text)))
        self._idf = {word: min(math.log1p(documents / df), self._idf_clip) for word, df in frequency.items()}
        return self

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        out = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(out, texts):
            # Sorted, so that the sum's rounding does not depend on the order of the words.
            for word, count in sorted(Counter(words(text)).items()):
                weight = self._idf.get(word, 0.0)
                if weight:
                    coordinates, signs = self._vector(word)
                    np.add.at(row, coordinates, np.float32((1 + math.log(count)) * weight) * signs)
            norm = float(np.sqrt(np.sum(np.square(row, dtype=np.float64))))
            if norm:
                row /= np.float32(norm)
        return out

    def embed_passages(self, texts: Sequence[str]) -> np.ndarray:
        return self.embed_queries(texts)

    def warm_up(self) -> None:
        pass  # nothing is compiled

    def _vector(self, word: str) -> tuple[np.ndarray, np.ndarray]:
        if word not in self._vectors:
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), key=self._key, digest_size=4 * _NONZEROS)
            draws = np.frombuffer(digest.digest(), "<u4")
            signs = np.where(draws & 1, 1, -1).astype(np.float32) / np.float32(math.sqrt(_NONZEROS))
            self._vectors[word] = ((draws >> 1) % self.dim).astype(np.int64), signs
        return self._vectors[word]
