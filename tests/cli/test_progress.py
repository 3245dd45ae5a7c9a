"""Bars, boards and lines in a log: never silent for long, and quiet where nobody looks."""

from __future__ import annotations

import io
import time

import pytest

from regard import progress
from regard.progress import Board, Counter, Row, clock


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def stage(monkeypatch):
    made = progress.Stage()
    monkeypatch.setattr(progress, "STAGE", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


def test_time_left_goes_by_what_was_done_now():
    assert Row("x", 10, done=5, before=0).left(20) == 20
    assert Row("x", 10, done=5, before=4).left(2) == 10
    assert Row("x", 10, done=4, before=4).left(2) is None
    assert Row("x", None, done=4).left(2) is None
    assert (clock(59.7), clock(61), clock(3600)) == ("1:00", "1:01", "1:00:00")


def test_a_board_weighs_its_parts_by_what_they_take():
    board = Board({"slow": 2, "fast": 10}, done={"fast": 10}, seconds={"slow": 30.0, "fast": 1.0})
    with board:
        board.advance("slow")
        assert (board.all.done, board.all.total, board.all.before) == (40, 70, 10)
        assert board.line().startswith("11 of 12 steps (57 %) after 0:00, about 0:00 left; slow 1 of 2")


def test_a_board_that_does_not_fit_shows_what_is_left(monkeypatch):
    monkeypatch.setattr(progress, "console_height", lambda: 5)
    board = Board({f"part {number}": 1 for number in range(6)})
    board.advance("part 0")
    assert [row.what for row in board.rows()] == ["part 1", "part 2", "all"]
    monkeypatch.setattr(progress, "console_height", lambda: 24)
    assert len(board.rows()) == 7


def test_a_library_is_quiet_in_a_log(monkeypatch, stage):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setattr("sys.stderr", screen := Screen(terminal=False))
    with Counter("reading", 3):
        time.sleep(0.1)
    assert screen.getvalue() == ""


@pytest.mark.parametrize(("terminal", "every"), [(False, "EVERY"), (True, "DUMB")])
def test_a_log_and_a_dumb_terminal_get_lines_also_within_a_long_step(monkeypatch, stage, terminal, every):
    monkeypatch.setattr(progress, every, 0.02)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stderr", screen := Screen(terminal))
    stage.logged = True
    with Board({"agreement · raw": 2}) as board, Counter("inside", 3):
        board.advance("agreement · raw")
        deadline = time.monotonic() + 10
        while screen.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = screen.getvalue().splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("regard: 1 of 2 steps (50 %) after 0:00") for line in lines)
    assert "agreement · raw 1 of 2" in lines[0]
    assert not stage.at_work


def test_a_terminal_gets_bars_that_leave_no_trace(monkeypatch, stage):
    monkeypatch.setattr("sys.stderr", screen := Screen(terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    with Counter("starting torch", None, patience=0):
        assert stage.live is not None
        time.sleep(0.5)
    assert stage.live is None
    assert "starting torch" in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back
    assert "\x1b[3" not in screen.getvalue().replace("\x1b[3m", "")  # no colours


def test_what_is_short_shows_nothing(monkeypatch, stage):
    monkeypatch.setattr("sys.stderr", screen := Screen(terminal=True))
    with Counter("a moment", 3) as counter:
        counter.advance()
    assert screen.getvalue() == ""


def test_a_bar_appears_where_nothing_advances_and_goes_after_a_failure(monkeypatch, stage):
    monkeypatch.setattr("sys.stderr", screen := Screen(terminal=True))

    def fail_after_a_while():
        with Counter("a long step", 2, patience=0.1):
            deadline = time.monotonic() + 10
            while stage.live is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_after_a_while()
    assert "a long step" in screen.getvalue()
    assert stage.live is None
    assert not stage.at_work
