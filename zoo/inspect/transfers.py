"""Transfers on the links of a chip, in the order in which a program starts them, and the products that cover them."""

import dataclasses
from collections.abc import Collection, Mapping

_LINKS = (False, True)
"""Values of `crosses`: fast links and the network are used at the same time."""


@dataclasses.dataclass
class Totals:
    """Sums of a collective over its executions."""

    times: int = 0
    products: int = 0
    product_seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class TimedTransfer:
    """One execution of a collective, with its seconds."""

    key: int
    """The collective, for `Transfers.totals`."""
    seconds: float
    """Seconds on its link."""
    crosses: bool
    """True for the network, False for fast links."""


@dataclasses.dataclass
class _OpenTransfer:
    """A transfer between start and done."""

    transfer: TimedTransfer
    start: int
    launch: int
    left: float
    """Seconds that no product has covered yet."""


class Transfers:
    """Follows transfers from start to done. A link carries them one by one, in the order of their starts."""

    def __init__(self) -> None:
        self.totals: dict[int, Totals] = {}
        """By the key of a collective."""
        self._open: list[_OpenTransfer] = []
        self._launches = 0

    def start(self, start: int, transfers: Collection[TimedTransfer]) -> None:
        """Start transfers that one done waits for. `start` is the identity of the start, which a loop repeats."""
        self._launches += 1
        for transfer in transfers:
            self._get_totals(transfer.key).times += 1
            self._open.append(_OpenTransfer(transfer, start, self._launches, transfer.seconds))

    def wait(self, transfer: TimedTransfer) -> None:
        """Add a synchronous transfer, which nothing covers."""
        totals = self._get_totals(transfer.key)
        totals.times += 1
        totals.exposed_seconds += transfer.seconds

    def cover(self, seconds: float, products: int) -> None:
        """Cover open transfers by products: on each link the oldest that is not complete, and so on. Seconds that
        nothing is left for count for the newest."""
        for opened in self._open:
            self._get_totals(opened.transfer.key).products += products
        for crosses in _LINKS:
            queue = [opened for opened in self._open if opened.transfer.crosses == crosses]
            spare = seconds
            for opened in queue:
                covered = min(spare, opened.left)
                if opened is queue[-1]:
                    covered = spare
                opened.left = max(0.0, opened.left - covered)
                spare -= covered
                self._get_totals(opened.transfer.key).product_seconds += covered

    def finish(self, starts: Collection[int]) -> None:
        """Wait for the oldest open transfers of one of these starts, and for those before them on their link."""
        launch = next((opened.launch for opened in self._open if opened.start in starts), None)
        if launch is None:
            return
        waited = {opened.transfer.crosses for opened in self._open if opened.launch == launch}
        for opened in self._open:
            if opened.launch <= launch and opened.transfer.crosses in waited:
                self._expose(opened)
        self._open = [opened for opened in self._open if opened.launch != launch]

    def finish_all(self) -> None:
        """Wait for transfers that no done waits for."""
        for opened in self._open:
            self._expose(opened)
        self._open = []

    def describe_open(self) -> tuple:
        """Return what the open transfers have left, to compare."""
        return tuple((opened.transfer, opened.start, opened.left) for opened in self._open)

    def copy_totals(self) -> dict[int, Totals]:
        return {key: dataclasses.replace(totals) for key, totals in self.totals.items()}

    def repeat(self, before: Mapping[int, Totals], times: int) -> None:
        """Add what has been added to the totals since `before`, so many times more."""
        for key, totals in self.totals.items():
            earlier = before.get(key, Totals())
            for field in dataclasses.fields(Totals):
                value = getattr(totals, field.name)
                added = value - getattr(earlier, field.name)
                setattr(totals, field.name, value + times * added)

    def _get_totals(self, key: int) -> Totals:
        return self.totals.setdefault(key, Totals())

    def _expose(self, opened: _OpenTransfer) -> None:
        self._get_totals(opened.transfer.key).exposed_seconds += opened.left
        opened.left = 0.0
