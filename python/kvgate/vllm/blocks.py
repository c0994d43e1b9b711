"""vLLM's blocks that copies read, held by references of kvgate's own: vLLM gives none of them to others, whatever becomes of
their request."""

import dataclasses

NULL = 0
"""The block that stands for none."""


@dataclasses.dataclass
class Copied:
    blocks: list[int]
    ranks: int
    """That may still copy out of them."""
    is_told: bool = False
    """The workers know of the store."""


@dataclasses.dataclass
class Kept:
    """Of one group, neighbours."""

    first: int
    """Place of the first in the request's block table."""
    blocks: list[int]


class Blocks:
    """Nothing in here throws, so that all references come back also after something else has thrown."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.pool = None
        """vLLM's."""
        self.copied: dict[str, Copied] = {}
        """By store."""
        self.kept: dict[str, dict[tuple[int, int], Kept]] = {}
        """Blocks of windows whose chunk is not full yet, by request, and by kind and group."""

    def bind(self, pool):
        self.pool, reset = pool, pool.reset_prefix_cache

        def give_back_and_reset():
            # vLLM forgets its cache only while nobody holds a block, and tells no connector before it looks.
            for request in list(self.kept):
                self.drop(request)
            # Nothing is given to others before they are held again.
            copied = [block for copied in self.copied.values() for block in copied.blocks]
            self.free(copied)
            try:
                return reset()
            finally:
                self.touch(copied)

        pool.reset_prefix_cache = give_back_and_reset

    # ---- stores

    def copy(self, job, new, kept):
        """A store reads blocks that the request has now, and blocks that were kept, whose references it takes over."""
        self.touch(new)
        self.copied[job] = Copied([*new, *kept], self.ranks)

    def told(self):
        for copied in self.copied.values():
            copied.is_told = True

    def freed(self, jobs):
        """So many ranks need a store's blocks no more."""
        for job, ranks in jobs.items():
            if (copied := self.copied.get(job)) is not None:
                copied.ranks -= ranks
                if copied.ranks <= 0:
                    self.free(self.copied.pop(job).blocks)

    # ---- windows

    def keep(self, request, place, first, table, end):
        """Blocks of one kind and group, from place `first` of the block table to `end`, as soon as each is full."""
        kept = self.kept.setdefault(request, {}).setdefault(place, Kept(first, []))
        known = kept.first + len(kept.blocks)
        new = table[known:end] if known < end else []
        self.touch(new)
        kept.blocks.extend(new)

    def take(self, request, place, first, end):
        """The kept blocks of these places, with their references; what is before them is given back. None: some are not
        there."""
        kept = self.kept.get(request, {}).get(place)
        if kept is None or first < kept.first or kept.first + len(kept.blocks) < end:
            return None
        self.free(kept.blocks[: first - kept.first])
        taken = kept.blocks[first - kept.first : end - kept.first]
        del kept.blocks[: end - kept.first]
        kept.first = end
        if NULL in taken:
            self.free(taken)
            return None
        return taken

    def drop(self, request):
        """Nothing more is stored of these blocks."""
        for kept in self.kept.pop(request, {}).values():
            self.free(kept.blocks)

    # ---- vLLM lacks blocks

    def give_back(self):
        """What is only kept is vLLM's at once. Answers whether there was any, and the stores that alone hold blocks."""
        gave = False
        for request in list(self.kept):
            for kept in self.kept[request].values():
                if any(block != NULL and self.pool.blocks[block].ref_cnt == 1 for block in kept.blocks):
                    gave = True
                    self.free(kept.blocks)
                    kept.blocks = [NULL] * len(kept.blocks)
        alone = {
            job
            for job, copied in self.copied.items()
            if any(self.pool.blocks[block].ref_cnt == 1 for block in copied.blocks)
        }
        return gave, alone

    def give_up(self):
        """No more stores: all but what the workers know of is vLLM's."""
        for request in list(self.kept):
            self.drop(request)
        for job in [job for job, copied in self.copied.items() if not copied.is_told]:
            self.free(self.copied.pop(job).blocks)

    # ---- references

    def touch(self, blocks):
        self.pool.touch([self.pool.blocks[block] for block in blocks if block != NULL])

    def free(self, blocks):
        """The last first, as vLLM does: the beginning of a prompt is wanted longest."""
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks) if block != NULL])
