"""What is answered when one of SGLang's calls throws: its threads go on without reuse, and would end otherwise."""

import functools
import logging
import time

from kvgate._native import PanicException

logger = logging.getLogger(__name__)

TOLD_SECONDS = 30
"""A trouble that goes on is told once in this time."""


class Troubles:
    """Lines in the log about what fails again and again, each with the number of those that were not told."""

    def __init__(self, now=time.monotonic):
        self.now = now
        self.told = {}

    def tell(self, what, reason):
        last, untold = self.told.get(what, (None, 0))
        if last is not None and self.now() - last < TOLD_SECONDS:
            self.told[what] = last, untold + 1
            return
        self.told[what] = self.now(), 0
        more = f" ({untold} more since the last line)" if untold else ""
        logger.warning("kvgate: %s: %s%s", what, reason, more)


def guarded(instead):
    """A call that never throws: it answers what `instead(storage, *arguments)` does."""

    def mark(call):
        @functools.wraps(call)
        def safe(storage, *arguments, **named):
            try:
                return call(storage, *arguments, **named)
            except (Exception, PanicException) as error:
                storage.troubles.tell(f"{call.__name__} failed", f"{type(error).__name__}: {error}")
                return instead(storage, *arguments, **named)

        return safe

    return mark
