"""What is printed on a terminal, in a file, and when quiet."""

import io

import pytest
from rich.console import Console

from cipo_jax.training.progress import Progress


def shown(terminal: bool, width: int = 100, **settings) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(console=Console(file=stream, force_terminal=terminal, width=width), **settings), stream


def run(progress: Progress) -> None:
    progress.say("[bold]model 1.2 M parameters")
    with progress.phase("RL", total=4, done=1) as phase:
        for step in range(3):
            with progress.phase("evaluation", total=2) as inner:
                inner.advance(2, em=0.25)
            phase.advance(reward=0.1 * step, tokens_per_s=12345.6, ealr=None)
    progress.table("Result", ["", "before", "after"], [["EM", 0.25, 0.7512], ["searches", 2, None]])


def test_a_file_gets_whole_lines():
    progress, stream = shown(False, line_every_s=0.0)
    run(progress)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[bold]model 1.2 M parameters"  # text is text, not markup
    assert lines[1].startswith("evaluation 2/2  em 0.250  0:00 elapsed")
    rl = [line for line in lines if line.startswith("RL")]
    assert [line.split("  ")[0] for line in rl] == ["RL 2/4", "RL 3/4", "RL 4/4"]
    assert "reward 0.100  tokens_per_s 12,346  ealr -" in rl[1] and rl[1].endswith("left")
    assert "\x1b" not in stream.getvalue()
    table = stream.getvalue().split("Result")[1]
    assert "0.751" in table and " 2 " in table and " - " in table


def test_lines_in_a_file_are_seldom_but_the_end_is_always_told():
    progress, stream = shown(False, line_every_s=1000.0)
    with progress.phase("warm start", total=500) as phase:
        for _ in range(500):
            phase.advance(loss=1.5)
    assert stream.getvalue().splitlines() == ["warm start 500/500  loss 1.500  0:00 elapsed  0:00 left"]


@pytest.mark.parametrize("width", [60, 100])
def test_a_terminal_shows_all_numbers_whatever_its_width(width):
    progress, stream = shown(True, width=width)
    run(progress)
    text = stream.getvalue()
    for part in ("RL", "evaluation", "4/4", "12,346", "0.751"):
        assert part in text
    assert "…" not in text


def test_quiet_prints_nothing_and_a_failure_passes_through():
    progress, stream = shown(True, quiet=True)
    run(progress)
    assert stream.getvalue() == ""
    progress, stream = shown(True)
    with pytest.raises(ValueError, match="boom"), progress.phase("RL", total=2):
        raise ValueError("boom")
    with progress.phase("again", total=1) as phase:  # the display can be used after it
        phase.advance()
    assert "again" in stream.getvalue()
