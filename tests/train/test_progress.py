"""Lines above a progress bar, and in its place, are printed as they are and do not control the terminal."""

import pytest

from zoo.train.progress import LineProgress, ProgressBar


@pytest.mark.parametrize("make", [LineProgress, ProgressBar])
def test_print_line_escapes_controls_and_has_no_markup(make, capsys):
    progress = make(3)
    progress.print_line("[red]sample[/red] :smile: \x1b[2J\u202eabc\r")
    progress.update(1, {"loss": 1.5}, {"seconds_left": 2.0})
    progress.close()
    shown = capsys.readouterr().out
    assert "[red]sample[/red] :smile: \\x1b[2J\\u202eabc\\r\n" in shown and "\x1b[2J" not in shown
