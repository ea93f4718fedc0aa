"""The recording of a terminal: docs/record.py."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from tests.docs.pages import DOCS
from tests.house.package import script

record = script("record")


def test_a_command_is_recorded_in_a_terminal() -> None:
    """What a command prints comes in its order with rising times, and the command sees a terminal."""
    code = "import sys; print('first'); print(sys.stdout.isatty()); print('last', end=''); sys.exit(3)"
    lines, status = record.record([sys.executable, "-c", code], columns=80, seconds=60)
    assert [text for _, text in lines] == ["first", "True", "last"]
    assert status == 3
    assert [at for at, _ in lines] == sorted(at for at, _ in lines)


@pytest.mark.slow("waits for a limit to pass")
@pytest.mark.parametrize("goes_on", ["time.sleep(1000)", "print('.', end='', flush=True)"], ids=["silent", "prints"])
def test_a_command_that_does_not_end_is_ended(goes_on: str) -> None:
    """After its seconds a command is killed, whether it prints or not, and what it had printed is there."""
    code = f"import time; print('begun', flush=True)\nwhile True: time.sleep(0.05); {goes_on}"
    lines, status = record.record([sys.executable, "-c", code], columns=80, seconds=8)
    assert lines[0][1] == "begun"
    assert status == -9


def test_lines_are_what_a_terminal_shows() -> None:
    """Colours are gone, a carriage return begins the line anew, and letters that come in pieces are put together."""
    chunks = [(0.1, b"\x1b[31mred\x1b[0m\r\n10 %\r"), (0.2, b"100 %\r\nd\xc3"), (0.3, b"\xa9j\xc3\xa0\n")]
    assert list(record.lines_of(chunks)) == [(0.1, "red"), (0.2, "100 %"), (0.3, "déjà")]


def test_long_lines_take_several_rows() -> None:
    """A line that is longer than the terminal is wide goes on in the next row; an empty one takes a row too."""
    assert record.rows_of("abcdefg", 3) == ["abc", "def", "g"]
    assert record.rows_of("", 3) == [""]


def test_the_picture_is_whole_without_its_animation() -> None:
    """All lines are in the picture as text, those with signs of markup too, and later ones appear later."""
    drawn = record.svg("make demo", [(0.0, "a < b & c"), (1.0, ""), (2.0, "    end")], speed=2)
    texts = [
        "".join(each.itertext()) for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert texts == ["$ make demo", "a < b & c", "    end"]
    assert drawn.index("animation-delay: 0.50s") < drawn.index("animation-delay: 1.50s")


def test_the_demo_is_recorded_without_this_machine() -> None:
    """The recording on the site shows the end of the demo, and no absolute path."""
    drawn = (DOCS / "pictures" / "demo.svg").read_text()
    assert "What to try next:" in drawn
    assert not [path for path in ("/home/", "/tmp/", "/root", "/work") if path in drawn]
