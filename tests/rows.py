"""Which rows of the specification are proved, by which tests: `python -m tests.rows`.

Reads the table in rows.toml and the `@pytest.mark.row(...)` decorators of the test files, as source. The exit status is
1 if a row that is not deferred has no test, or a test names a row that is not in the table.
"""

import ast
import dataclasses
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Deferral", "Report", "Table", "collect_marks", "read_table"]

TESTS = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Deferral:
    """A row that is not built yet: the topic that will bring it, why it waits, and what its use raises today."""

    topic: str
    reason: str
    raises: str


@dataclasses.dataclass(frozen=True)
class Table:
    """rows: id -> name. deferred: id -> Deferral."""

    rows: dict[str, str]
    deferred: dict[str, Deferral]


@dataclasses.dataclass(frozen=True)
class Report:
    """proofs: id -> tests that carry it, as file::test."""

    table: Table
    proofs: dict[str, list[str]]

    @property
    def proved(self) -> list[str]:
        return [row for row in self.table.rows if row in self.proofs and row not in self.table.deferred]

    @property
    def missing(self) -> list[str]:
        return [row for row in self.table.rows if row not in self.proofs and row not in self.table.deferred]

    @property
    def unknown(self) -> list[str]:
        return sorted(set(self.proofs) - set(self.table.rows))

    def lines(self) -> Iterator[str]:
        """The report, for people."""
        for row, name in self.table.rows.items():
            tests = ", ".join(self.proofs.get(row, []))
            if row in self.table.deferred:
                wait = self.table.deferred[row]
                yield f"deferred  {row}  {name}: {wait.reason} ({wait.topic}). {wait.raises}" + (
                    tests and f" [{tests}]"
                )
            else:
                yield f"{'proved  ' if tests else 'MISSING '}  {row}  {name}" + (tests and f": {tests}")
        for row in self.unknown:
            yield f"UNKNOWN   {row}  named by {', '.join(self.proofs[row])}"
        yield (
            f"{len(self.proved)} proved, {len(self.table.deferred)} deferred, {len(self.missing)} missing, "
            f"{len(self.unknown)} unknown, of {len(self.table.rows)} rows"
        )


def read_table(path: Path = TESTS / "rows.toml") -> Table:
    raw = tomllib.loads(path.read_text())
    return Table(raw["rows"], {row: Deferral(**fields) for row, fields in raw["deferred"].items()})


def collect_marks(folder: Path = TESTS) -> dict[str, list[str]]:
    """id -> tests of the test files below `folder` that carry it, on themselves, their class or their module."""
    proofs: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        place = path.relative_to(folder.parent).as_posix()
        for row, test in _marks(ast.parse(path.read_text(), str(path)), place):
            if test not in proofs[row]:
                proofs[row].append(test)
    return dict(proofs)


def _marks(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        here = f"{place}::{child.name}" if named else place
        if isinstance(child, ast.Call) and ast.unparse(child.func) == "pytest.mark.row":
            for argument in child.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise ValueError(f"{place}: the ids of a row mark are written out as strings.")
                yield argument.value, place
        yield from _marks(child, here)


def main() -> int:
    report = Report(read_table(), collect_marks())
    for line in report.lines():
        print(line)
    return 1 if report.missing or report.unknown else 0


if __name__ == "__main__":
    sys.exit(main())
