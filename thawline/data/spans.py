"""The windows of a run as days and as microseconds."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from thawline.config import Windows
from thawline.data.engine import DAY_US
from thawline.data.manifest import Window

EPOCH = datetime.date(1970, 1, 1)


@dataclass(frozen=True)
class Spans:
    """The windows of a run."""

    pretrain: Window
    finetune: Window
    test: Window

    @classmethod
    def ending(cls, end: datetime.date, settings: Windows) -> Spans:
        """The windows of which the test window's last day is `end`."""
        test = _days_up_to(end, settings.test_days)
        finetune = _days_up_to(_day_before(test.start), settings.finetune_days)
        last = finetune.end if settings.pretrain_overlap else _day_before(finetune.start)
        return cls(_days_up_to(last, settings.pretrain_days), finetune, test)


def _days_up_to(end: datetime.date, count: int) -> Window:
    return Window(start=end - datetime.timedelta(days=count - 1), end=end)


def _day_before(day: datetime.date) -> datetime.date:
    return day - datetime.timedelta(days=1)


def span_of(window: Window) -> tuple[int, int]:
    """First microsecond of a window and of what follows it."""
    start, end = ((day - EPOCH).days for day in (window.start, window.end))
    return start * DAY_US, (end + 1) * DAY_US
