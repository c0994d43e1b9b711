"""What is answered when one of vLLM's calls throws: the engine goes on without reuse."""

import functools

from vllm.logger import init_logger

from kvgate._native import PanicException
from kvgate.vllm.metadata import StepMetadata

logger = init_logger(__name__)


def guarded(instead=lambda connector, *_, **__: None):
    """A call that never throws. After the first error of any of them kvgate is off, and each answers what `instead` does."""

    def mark(hook):
        @functools.wraps(hook)
        def call(connector, *arguments, **named):
            if not connector.is_off:
                try:
                    return hook(connector, *arguments, **named)
                except (Exception, PanicException) as error:
                    connector._turn_off(f"{hook.__name__} threw {type(error).__name__}: {error}")
            return instead(connector, *arguments, **named)

        return call

    return mark


class Owed:
    """What the scheduler's side has promised vLLM and no worker has been told of: kept apart from what may throw, so that it
    is known then."""

    def __init__(self):
        self.local: dict[str, int] = {}
        """Blocks that vLLM had itself when it was told of more, by request."""
        self.loads: dict[str, list[int]] = {}
        """The blocks of loads that vLLM counts on: those of the first group."""

    def allocated(self, request_id, blocks):
        self.loads[request_id] = list(blocks[self.local.get(request_id, 0) :])

    def told(self):
        self.loads = {}

    def step(self):
        """Tells the workers that none of it was done, and to copy out of no block any more."""
        meta = StepMetadata(lost=self.loads, is_all_taken_back=True)
        self.told()
        return meta
