"""The table of rows is whole, and the tool that reads it tells the truth."""

from pathlib import Path

import pytest

from llmkernel.config import EngineArgs
from llmkernel.errors import UnsupportedFeatureError
from tests.rows import Deferral, Report, Table, collect_marks, read_table


def test_the_table_holds_every_row_once() -> None:
    table = read_table()
    assert list(table.rows) == [f"A-{number:03}" for number in range(1, 164)]
    assert all(table.rows.values())
    assert set(table.deferred) <= set(table.rows)


def test_every_deferral_says_what_raises() -> None:
    for deferral in read_table().deferred.values():
        assert all((deferral.topic, deferral.reason, deferral.raises))


def test_what_waits_for_data_parallel_raises() -> None:
    waiting = [row for row, wait in read_table().deferred.items() if wait.raises.startswith("EngineArgs(data_parallel")]
    assert "A-013" in waiting
    with pytest.raises(UnsupportedFeatureError, match="data_parallel_size"):
        EngineArgs(data_parallel_size=2)


def test_no_test_names_a_row_that_does_not_exist() -> None:
    assert Report(read_table(), collect_marks()).unknown == []


def test_marks_are_found_wherever_they_stand(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text(
        'pytestmark = pytest.mark.row("A-001")\n'
        '@pytest.mark.row("A-002", "A-003")\n'
        "def test_one(): pass\n"
        '@pytest.mark.row("A-002")\n'
        "async def test_two(): pass\n"
        "class TestThree:\n"
        '    @pytest.mark.row("A-004")\n'
        "    def test_in_class(self): pass\n"
        '@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.row("A-005"))])\n'
        "def test_parameter(x): pass\n"
    )
    (folder / "helper.py").write_text('@pytest.mark.row("A-009")\ndef no_test(): pass\n')
    assert collect_marks(folder) == {
        "A-001": ["tests/test_x.py"],
        "A-002": ["tests/test_x.py::test_one", "tests/test_x.py::test_two"],
        "A-003": ["tests/test_x.py::test_one"],
        "A-004": ["tests/test_x.py::TestThree::test_in_class"],
        "A-005": ["tests/test_x.py::test_parameter"],
    }


def test_an_id_that_is_not_written_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("@pytest.mark.row(*IDS)\ndef test_one(): pass\n")
    with pytest.raises(ValueError, match="written out"):
        collect_marks(tmp_path)


def test_the_report_tells_proved_deferred_missing_and_unknown() -> None:
    table = Table({"A-001": "one", "A-002": "two", "A-003": "three"}, {"A-002": Deferral("t", "later", "f(): Error")})
    report = Report(table, {"A-001": ["x::test"], "A-999": ["y::test"]})
    assert (report.proved, report.missing, report.unknown) == (["A-001"], ["A-003"], ["A-999"])
    assert list(report.lines()) == [
        "proved    A-001  one: x::test",
        "deferred  A-002  two: later (t). f(): Error",
        "MISSING   A-003  three",
        "UNKNOWN   A-999  named by y::test",
        "1 proved, 1 deferred, 1 missing, 1 unknown, of 3 rows",
    ]
