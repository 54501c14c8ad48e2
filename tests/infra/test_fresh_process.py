"""Objects in processes of their own: state, errors of each kind, and deaths."""

from __future__ import annotations

import os
import signal

import pytest

from infra.errors import UserError
from infra.fresh_process import FreshProcess


class Counter:
    def __init__(self, start: int) -> None:
        if start < 0:
            raise UserError(f"start is {start}; use 0 or more")
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("a fault")

    def refuse(self) -> None:
        raise UserError("a wrong input")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_object_keeps_its_state_in_another_process() -> None:
    with FreshProcess("counter", Counter, 5) as counter, FreshProcess("other", Counter, 0) as other:
        assert (counter.call("add", 2), counter.call("add", 2), other.call("add", 1)) == (7, 9, 1)
        assert len({os.getpid(), counter.call("pid"), other.call("pid")}) == 3
    assert not counter.alive
    counter.close()


def test_wrong_input_and_faults_are_told_apart() -> None:
    """Catches a fault shown to the user as their mistake, and a child that one error ends."""
    with FreshProcess("counter", Counter, 0) as counter:
        with pytest.raises(RuntimeError, match="counter: ValueError: a fault"):
            counter.call("fail")
        with pytest.raises(UserError, match="a wrong input"):
            counter.call("refuse")
        assert counter.call("add", 1) == 1
    with FreshProcess("counter", Counter, -1) as counter, pytest.raises(UserError, match="start is -1"):
        counter.call("add", 1)


def test_a_death_is_an_error_and_not_a_hang() -> None:
    with FreshProcess("counter", Counter, 0) as counter:
        with pytest.raises(RuntimeError, match=r"the counter process died \(exit code -9\)"):
            counter.call("die")
        with pytest.raises(RuntimeError, match="died"):
            counter.call("add", 1)
