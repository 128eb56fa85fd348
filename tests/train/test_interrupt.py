"""Signals set a flag; a second Ctrl-C raises; handlers are restored."""

import os
import signal
import threading

import pytest

from zoo.train import Interrupt


@pytest.fixture(autouse=True)
def in_the_foreground():
    """A shell starts what it runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    Interrupt.ended_by_sigterm = False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_sets_the_flag(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
    assert signal.getsignal(number) is before
    assert Interrupt.ended_by_sigterm == (number == signal.SIGTERM)


def test_interrupt_raises_on_second_ctrl_c():
    with pytest.raises(KeyboardInterrupt), Interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_ignores_other_threads():
    seen = []

    def work():
        with Interrupt() as interrupt:
            seen.append((signal.getsignal(signal.SIGINT), interrupt.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(signal.default_int_handler, False)]
