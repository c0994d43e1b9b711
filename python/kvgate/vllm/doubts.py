"""Which tokens in vLLM's blocks are not known to be right."""

import dataclasses

FOR_GOOD = float("inf")


@dataclasses.dataclass
class Step:
    """One with loads within it, of which not all ranks have told."""

    ranks: int = 0
    """That have."""
    loaded: set[int] = dataclasses.field(default_factory=set)
    """Blocks that are loaded as a whole."""
    failed: set[int] = dataclasses.field(default_factory=set)


class Doubts:
    """What is loaded within a step is computed from before anybody knows that it has come. Until all ranks have told, it is in
    doubt, with all that is computed from it, also by requests that share its blocks. If any of it failed, what was computed
    meanwhile stays in doubt until it is computed anew: vLLM goes on with some of it, and keeps it in its own cache."""

    def __init__(self, block_tokens, ranks):
        self.block_tokens, self.ranks = block_tokens, ranks
        self.blocks: dict[int, tuple[int, float]] = {}
        """Of each block that has any, its first token in doubt, and the last step with loads that it depends on."""
        self.number = 0
        self.steps: dict[int, Step] = {}

    def __bool__(self):
        return bool(self.blocks)

    def begin(self):
        """A step with loads of its own; answers its number."""
        self.number += 1
        self.steps[self.number] = Step()
        return self.number

    def ended(self, number, ranks, failed_blocks):
        """So many ranks have told what failed in a step."""
        step = self.steps[number]
        step.ranks += ranks
        step.failed |= failed_blocks & self.blocks.keys()
        if step.ranks < self.ranks:
            return
        del self.steps[number]
        if step.failed:
            came = step.loaded - step.failed
            self.blocks = {block: (first, FOR_GOOD) for block, (first, _) in self.blocks.items() if block not in came}
        else:
            self.blocks = {block: doubt for block, doubt in self.blocks.items() if doubt[1] > number}

    def loaded(self, table, start, end, number):
        """These tokens of a block table: within this step; None: before it, as is known."""
        for block, first, last in self.parts(table, start, end):
            self.note(block, first, last, number)
            if number is not None and last - first == self.block_tokens:
                self.steps[number].loaded.add(block)

    def computed(self, table, start, end):
        """These, from all before them."""
        number = self.step_of(table, start)
        for block, first, last in self.parts(table, start, end):
            self.note(block, first, last, number)
            for step in self.steps.values():
                step.loaded.discard(block)

    def sure(self, table, tokens):
        """How many of the first tokens are right."""
        if self.blocks.keys().isdisjoint(table):
            return tokens
        firsts = (
            at * self.block_tokens + self.blocks[block][0] for at, block in enumerate(table) if block in self.blocks
        )
        return min(tokens, next(firsts))

    def step_of(self, table, tokens):
        """The last step with loads that the first tokens depend on; None: they are right."""
        if self.blocks.keys().isdisjoint(table):
            return None
        doubts = ((last, self.blocks.get(block)) for block, _, last in self.parts(table, 0, tokens))
        return max((doubt[1] for last, doubt in doubts if doubt is not None and doubt[0] < last), default=None)

    def note(self, block, first, last, number):
        """These tokens of a block are new."""
        doubt = self.blocks.get(block)
        if number is not None:
            self.blocks[block] = (first, number) if doubt is None else (min(first, doubt[0]), max(number, doubt[1]))
        elif doubt is not None and first <= doubt[0] < last:
            del self.blocks[block]
            if last < self.block_tokens:
                self.blocks[block] = (last, doubt[1])

    def parts(self, table, start, end):
        size = self.block_tokens
        for at in range(start // size, -(-end // size)):
            # A window has no block where nobody attends to its tokens any more.
            if table[at]:
                yield table[at], max(start - at * size, 0), min(end - at * size, size)
