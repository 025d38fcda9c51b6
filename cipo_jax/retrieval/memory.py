"""How much memory an index takes, and whether the machine has it: told before anything is allocated."""

import dataclasses
from pathlib import Path

import faiss

from cipo_jax.errors import UserError

GIB = 2**30
_SMALLER = "set IndexSpec.factory to a smaller index (IVF4096,SQ8 takes a quarter of Flat) or use a larger machine"


@dataclasses.dataclass(frozen=True)
class IndexMemory:
    """Estimated bytes.

    Attributes:
      codes: the stored vectors, ids and lists.
      links: of a graph index.
      centroids: of an inverted file.
      training: the sample, while the index is trained.
    """

    codes: int
    links: int
    centroids: int
    training: int

    @property
    def serving(self) -> int:
        return self.codes + self.links + self.centroids

    @property
    def building(self) -> int:
        return self.serving + self.training


def index_memory(factory: str, rows: int, dim: int, train_rows: int = 0) -> IndexMemory:
    """Estimates what `factory` needs for `[rows, dim]` float32 vectors.

    Code sizes come from FAISS itself; an HNSW node has 2M links on level 0 and M on each of the further levels, which
    1/M of the nodes below reach. `UserError` when FAISS does not know the factory string.
    """
    index = make_index(factory, dim)  # kept: FAISS's downcasts and parts do not own what they refer to
    code, links, centroids = _parts(index, dim)
    return IndexMemory(rows * code, int(rows * links), centroids, 4 * dim * min(train_rows, rows))


def _parts(index: faiss.Index, dim: int) -> tuple[int, float, int]:
    """Bytes per stored vector, bytes of graph links per vector, bytes of centroids."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return _parts(index.index, dim)
    if isinstance(index, faiss.IndexRefine):
        code, links, centroids = _parts(index.base_index, dim)
        return code + _parts(index.refine_index, dim)[0], links, centroids
    if isinstance(index, faiss.IndexIVF):
        return index.code_size + 8, 0, index.nlist * dim * 4
    if isinstance(index, faiss.IndexHNSW):
        m = index.hnsw.nb_neighbors(1)
        # int32 links, plus an int32 level and a 64-bit offset per node.
        return _parts(index.storage, dim)[0], 4 * (2 * m + m / max(m - 1, 1)) + 12, 0
    return index.sa_code_size(), 0, 0


def make_index(factory: str, dim: int) -> faiss.Index:
    """An empty inner-product index; `UserError` when FAISS cannot read `factory`."""
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][:200]
        raise UserError(
            f"index factory {factory!r} is not one FAISS can make for dimension {dim} ({reason}); "
            "use Flat, IVF4096,SQ8, HNSW32 or another factory string"
        ) from None


def available_bytes() -> int:
    """Memory this process may still take: what the machine has free, or its control group's limit if lower."""
    free = None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path(limit_file).read_text()) - int(Path(used_file).read_text())
            free = limit if free is None else min(free, limit)
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return free if free is not None else 2**63


def preflight(what: str, needed: int, mend: str = _SMALLER, available: int | None = None) -> str:
    """Returns the line to show before `what` takes `needed` bytes; `UserError`, with `mend`, when they are not there."""
    available = available_bytes() if available is None else available
    line = f"{what} needs {needed / GIB:.2f} GiB of memory; {available / GIB:.2f} GiB are available"
    if needed > available:
        raise UserError(f"{line}; {mend}")
    return line
