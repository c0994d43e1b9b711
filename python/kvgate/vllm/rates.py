"""What is quicker: to load tokens or to compute them. From what both took so far.

Both are rates of the whole engine over the time in which it was busy with them: steps compute many requests at once, so the
loads of many requests are taken together, too.
"""

import math
import time
from collections import deque

FORGET = 0.9
"""What is left of a measurement when the next one comes."""
STEP_TOKENS = 128
"""A step with fewer tokens says nothing about prefills."""
TRY_AGAIN = 16
"""Of so many loads that would take too long one is done all the same: the gateway may have become quicker."""
STEPS_AHEAD = 16
"""Steps that may be given out and not have ended; vLLM gives out two, or one a pipeline stage."""


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


class LoadTimes:
    """Each moment is shared out among the loads under way, so that what they took adds up to the time in which there was
    any."""

    def __init__(self):
        self.under_way: dict[str, tuple[float, float]] = {}
        """By job, when it began, and `shared` then."""
        self.shared = 0.0
        """What a load took that was always under way."""
        self.told = 0.0
        """Until when `shared` counts."""

    def at(self, now):
        if self.under_way:
            self.shared += (now - self.told) / len(self.under_way)
        self.told = now

    def begin(self, job, now):
        self.at(now)
        self.under_way[job] = (now, self.shared)

    def end(self, job, seconds, now):
        """What the load took of the time. Its `seconds` were over when its step was not."""
        self.at(now)
        began, shared = self.under_way.pop(job)
        return (self.shared - shared) * min(1.0, seconds / (now - began)) if now > began else 0.0


class LoadOrCompute:
    def __init__(self, clock=time.monotonic):
        self.clock = clock
        self.prefill, self.load = Rate(), Rate()
        self.declined = 0
        self.loads = LoadTimes()
        self.steps: deque[tuple[float, int]] = deque(maxlen=STEPS_AHEAD)
        """Those under way: when each was given out, and its tokens."""
        self.last_ended = -math.inf
        """When the latest step had ended."""

    def stepped(self, tokens):
        """A step was given out. Others before it may be under way."""
        self.steps.append((self.clock(), tokens))

    def computed(self):
        """The oldest step under way has ended. It was computed after the one before."""
        if self.steps:
            given, tokens = self.steps.popleft()
            now = self.clock()
            if tokens >= STEP_TOKENS:
                self.prefill.add(tokens, now - max(given, self.last_ended))
            self.last_ended = now

    def load_begins(self, job):
        self.loads.begin(job, self.clock())

    def loaded(self, job, tokens, seconds):
        """A load has brought so many tokens in so many seconds. One that failed took its time, too."""
        if job in self.loads.under_way:
            self.load.add(tokens, self.loads.end(job, seconds, self.clock()))

    def dropped(self, job):
        """Nobody knows any more what a load was to bring."""
        self.loads.at(self.clock())
        self.loads.under_way.pop(job, None)

    def idle(self):
        """Nobody waits for a load any more."""
        self.loads = LoadTimes()

    def should_load(self, tokens):
        load, prefill = self.load.seconds_of(tokens), self.prefill.seconds_of(tokens)
        if load is None or prefill is None or load <= prefill:
            return True
        self.declined += 1
        return self.declined % TRY_AGAIN == 0
