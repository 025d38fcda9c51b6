"""What an audit has scored so far, in a file, so that one that was stopped goes on where it was."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class BatchStore:
    """A JSON line per scored batch, behind a first line that says what was asked.

    A file that answers another question, or no file, is begun anew; a last line that was cut off is dropped.

    Args:
      path: the file.
      about: what the scores depend on: model, transcripts, settings.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]):
        self.path = path
        head = json.dumps(about, sort_keys=True)
        *lines, rest = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        same = lines[:1] == [head]
        self._batches = dict(map(json.loads, lines[1:])) if same else {}
        if not same or rest:
            path.write_text("".join(line + "\n" for line in (lines if same else [head])), encoding="utf-8")

    def get(self, number: int) -> list[dict[str, Any]] | None:
        """The scores of a batch, if it has them."""
        return self._batches.get(number)

    def append(self, number: int, scored: Sequence[Mapping[str, Any]]) -> None:
        """Adds a batch."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps([number, scored], ensure_ascii=False) + "\n")
