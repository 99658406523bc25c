"""A line of the log is one line, whoever chose the words in it."""

from __future__ import annotations

import logging

import pytest

from async_rl.log import get_logger, plain, setup


@pytest.mark.parametrize("name", ["w\x1b[2J", "w\nERROR all is lost", "w\x9b2J", "w\u202egnp", "w\x7f"])
def test_a_name_that_would_move_the_cursor_or_make_a_line_is_written_escaped(name, capsys):
    before = {each: logging.getLogger(each).handlers[:] for each in ("async_rl", "orchestrator", "workers")}
    try:
        setup("test")
        get_logger("orchestrator.control").info("worker joined", worker=name)
        said = capsys.readouterr().err
    finally:
        for each, handlers in before.items():
            logging.getLogger(each).handlers[:] = handlers
            logging.getLogger(each).propagate = True
    assert said.rstrip("\n").isprintable() and 'worker joined worker="w\\' in said
    assert plain(name).isprintable()
