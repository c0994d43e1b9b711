"""What is quicker: to load tokens or to compute them. From what both took so far."""

import math
import time

FORGET = 0.9
"""What is left of a measurement when the next one comes."""
STEP_TOKENS = 128
"""A step with fewer tokens says nothing about prefills."""
TRY_AGAIN = 16
"""Of so many loads that would take too long one is done all the same: the gateway may have become quicker."""


class Rate:
    """Tokens a second; what was measured last counts most."""

    def __init__(self):
        self.tokens = self.seconds = 0.0

    def add(self, tokens, seconds):
        self.tokens = FORGET * self.tokens + tokens
        self.seconds = FORGET * self.seconds + seconds

    def seconds_of(self, tokens):
        """None: nothing was measured."""
        if not self.seconds:
            return None
        return tokens * self.seconds / self.tokens if self.tokens else math.inf


class LoadOrCompute:
    def __init__(self, clock=time.monotonic):
        self.clock = clock
        self.prefill, self.load = Rate(), Rate()
        self.declined = 0
        self.step = None
        """When the step under way was given out, and its tokens."""

    def stepped(self, tokens):
        """A step was given out; the one before is computed."""
        now = self.clock()
        if self.step is not None and self.step[1] >= STEP_TOKENS:
            self.prefill.add(self.step[1], now - self.step[0])
        self.step = (now, tokens)

    def idle(self):
        """What comes next does not follow a step."""
        self.step = None

    def loaded(self, tokens, seconds):
        self.load.add(tokens, seconds)

    def should_load(self, tokens):
        load, prefill = self.load.seconds_of(tokens), self.prefill.seconds_of(tokens)
        if load is None or prefill is None or load <= prefill:
            return True
        self.declined += 1
        return self.declined % TRY_AGAIN == 0
