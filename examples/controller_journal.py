"""What the roles of the controller example write down: files that outlive whoever wrote them.

The *journal* is the trainer's: the weight version and the groups that it stands for, replaced as a whole, so a step has
happened entirely or not at all. The *notes* are lines that each process appends before or after what it does. The
account at the end is made of both, and of what the plane still holds.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Journal", "Notes", "Tally"]


class Journal:
    """The weights of the trainer, of which this example has the version only, and the groups that it trained on."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.json"

    def read(self) -> tuple[int, list[str]]:
        """Return the weight version and all groups trained on, in order."""
        if not self.path.exists():
            return 0, []
        held = json.loads(self.path.read_text())
        return held["version"], held["groups"]

    def step(self, groups: Iterable[str]) -> int:
        """Write the next version and its groups, durably, and return the version."""
        version, before = self.read()
        held = {"version": version + 1, "groups": [*before, *groups]}
        beside = self.path.with_suffix(".new")
        with beside.open("w") as file:
            json.dump(held, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        return version + 1


class Notes:
    """Lines of one process; each is in the file before the process goes on."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.notes"

    def add(self, what: str, groups: Iterable[str]) -> None:
        """Append a line."""
        line = json.dumps({"what": what, "groups": list(groups)}) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    @staticmethod
    def all(folder: Path) -> dict[str, set[str]]:
        """Return the groups of all notes in a folder, by what was noted; half a line at the end of a file is none."""
        found: dict[str, set[str]] = {}
        for path in folder.glob("*.notes"):
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                found.setdefault(entry["what"], set()).update(entry["groups"])
        return found


@dataclass(frozen=True)
class Tally:
    """The account of a run; all numbers count groups.

    Attributes:
        committed: Groups of which a worker knows that they were committed, or that turned up.
        trained, evicted, left: What became of them; ``evicted`` were given up by the controller and are gone.
        lost: Committed, and neither trained, evicted nor left.
        trained_twice: In the journal more than once.
        wrong: Trained on with rows of another group.
    """

    committed: int
    trained: int
    evicted: int
    left: int
    lost: int
    trained_twice: int
    wrong: int

    @classmethod
    def of(cls, folder: Path, left: set[str]) -> Tally:
        """Make the account from the files of a run and the groups that the plane still holds."""
        noted = Notes.all(folder)
        _, journal = Journal(folder).read()
        trained = set(journal)
        evicted = noted.get("evict", set()) - trained - left
        committed = noted.get("committed", set()) | trained | left
        return cls(
            len(committed),
            len(trained),
            len(evicted & committed),
            len(left - trained),
            len(committed - trained - evicted - left),
            sum(count - 1 for count in Counter(journal).values()),
            len(noted.get("wrong", set())),
        )

    @property
    def adds_up(self) -> bool:
        """Whether each group had exactly one fate."""
        whole = self.committed == self.trained + self.evicted + self.left
        return whole and not (self.lost or self.trained_twice or self.wrong)

    def lines(self) -> list[str]:
        """Say it in words."""
        return [
            f"committed {self.committed} groups = trained {self.trained} + evicted {self.evicted} + left {self.left}",
            f"lost {self.lost}, trained twice {self.trained_twice}, wrong rows {self.wrong}",
            "the account adds up" if self.adds_up else "THE ACCOUNT DOES NOT ADD UP",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)
