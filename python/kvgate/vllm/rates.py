"""Whether loading tokens is quicker than computing them, by the rates of both so far.

Both are rates of the whole engine over the time in which it was busy with them: steps compute many requests at once, so the
loads of many requests are taken together, too.
"""

import math
import time
from collections import deque

FORGET = 0.9
"""The weight that earlier measurements keep when the next one comes."""
STEP_TOKENS = 128
"""A step with fewer tokens says nothing about prefills."""
TRY_AGAIN = 16
"""One in this many loads that would take too long is done all the same: the gateway may have become quicker."""
STEPS_AHEAD = 16
"""The most steps under way. vLLM gives out two at a time, or one for each pipeline stage."""


class Rate:
    """Tokens in a second. The latest measurement counts most."""

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
    """The time that each load took. Each moment is divided among the loads under way, so the times of all loads add up to
    the time in which any was under way."""

    def __init__(self):
        self.under_way: dict[str, tuple[float, float]] = {}
        """By job, its beginning, and `shared` at that time."""
        self.shared = 0.0
        """The time of a load that has been under way since the start."""
        self.told = 0.0
        """The time up to which `shared` counts."""

    def at(self, now):
        if self.under_way:
            self.shared += (now - self.told) / len(self.under_way)
        self.told = now

    def begin(self, job, now):
        self.at(now)
        self.under_way[job] = (now, self.shared)

    def end(self, job, seconds, now):
        """The load's time. It may have ended before its step, after `seconds`."""
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
        """The steps under way: the time at which each was given out, and its tokens."""
        self.last_ended = -math.inf
        """The end of the latest step."""

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
        """A load has brought `tokens` in `seconds`. A load that failed took its time, too."""
        if job in self.loads.under_way:
            self.load.add(tokens, self.loads.end(job, seconds, self.clock()))

    def dropped(self, job):
        """A load is forgotten: its tokens are not known any more."""
        self.loads.at(self.clock())
        self.loads.under_way.pop(job, None)

    def idle(self):
        """No load is under way any more."""
        self.loads = LoadTimes()

    def should_load(self, tokens):
        load, prefill = self.load.seconds_of(tokens), self.prefill.seconds_of(tokens)
        if load is None or prefill is None or load <= prefill:
            return True
        self.declined += 1
        return self.declined % TRY_AGAIN == 0
