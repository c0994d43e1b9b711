"""Which chunks are stored after a step: of each kind of KV those that are full then, that nobody has yet, and whose blocks are
all there."""

import dataclasses
import itertools

from kvgate.vllm.blocks import NULL
from kvgate.vllm.metadata import Store, StorePart, traceparent_of


@dataclasses.dataclass
class OpenStore:
    """One that not all ranks have ended."""

    request: str
    parts: list[tuple[int, list[int]]]
    """The kind and the chunks of each."""
    there: set[tuple[int, int]]
    """Kind, and place among its chunks, of those that are there for all ranks that have ended it."""
    notes: list[object]
    """For each chunk of the first kind: what its events tell."""
    of: tuple[object, object]
    """The request and its prompt."""
    ranks: int = 0
    """That have ended it."""


class Stores:
    def __init__(self, model, blocks, events, jobs, state_every):
        self.model, self.blocks, self.events, self.jobs = model, blocks, events, jobs
        self.state_every = state_every
        """Chunks between the snapshots that are kept wherever prompts end."""
        self.open: dict[str, OpenStore] = {}

    def of_step(self, state, table, full, end, offers):
        """The store of a request whose first `full` chunks are right after the step, and whose first `end` tokens are known.
        None: there is nothing to store."""
        request = state.request.request_id
        parts, copied, kept = [], [], []
        for index, kind in enumerate(self.model.kinds):
            if kind.is_draft and not state.has_drafts:
                continue
            if kind.word == "state":
                chunks, tables = self.snapshot(state, index, kind, full, offers)
            elif kind.word == "full":
                chunks, tables = self.prefix(state, index, kind, full, table)
            else:
                chunks, tables = self.window(state, index, kind, full, table, end)
            if not chunks:
                continue
            parts.append(self.part(state, index, chunks, tables))
            (kept if kind.word in ("window", "chunked") else copied).extend(
                itertools.chain.from_iterable(tables.values())
            )
        if not parts:
            return None
        job = f"{request}#{next(self.jobs)}"
        self.blocks.copy(job, copied, kept)
        first = parts[0].chunks if parts[0].kind == 0 else []
        self.open[job] = OpenStore(
            request,
            [(part.kind, part.chunks) for part in parts],
            {(part.kind, at) for part in parts for at in range(len(part.chunks))},
            [self.events.note(state.request, state.prompt, chunk) for chunk in first] if self.events else [],
            (state.request, state.prompt),
        )
        return Store(job, request, parts, traceparent_of(state.request))

    def part(self, state, index, chunks, tables):
        prompt = state.prompt
        return StorePart(
            index,
            chunks,
            b"".join(prompt.hashes(chunk, chunk + 1) for chunk in chunks),
            b"".join(prompt.parent(chunk) for chunk in chunks),
            tables,
        )

    def prefix(self, state, index, kind, full, table):
        first = state.found[index]
        if full <= max(first, state.handed[index]):
            return [], {}
        state.found[index] = state.handed[index] = full
        chunk_tokens = self.model.chunk_tokens
        return list(range(first, full)), {
            group: table[group][first * chunk_tokens // size : full * chunk_tokens // size]
            for group, size in kind.blocks.items()
        }

    def window(self, state, index, kind, full, table, end):
        """vLLM frees blocks that the window has left behind, so they are kept until their chunk is full."""
        request, chunk_tokens = state.request.request_id, self.model.chunk_tokens
        for group, size in kind.blocks.items():
            first = state.found[index] * chunk_tokens // size
            self.blocks.keep(request, (index, group), first, table[group], end // size)
        chunks, tables = self.once_more(state, index, kind, full, table)
        for chunk in range(state.found[index], full):
            taken = {
                group: self.blocks.take(
                    request, (index, group), chunk * chunk_tokens // size, (chunk + 1) * chunk_tokens // size
                )
                for group, size in kind.blocks.items()
            }
            if None in taken.values():
                for blocks in taken.values():
                    self.blocks.free(blocks or ())
                continue
            chunks.append(chunk)
            for group, blocks in taken.items():
                tables[group].extend(blocks)
        state.found[index] = max(state.found[index], full)
        state.handed[index] = state.found[index]
        return chunks, tables

    def once_more(self, state, index, kind, full, table):
        """Chunks whose store failed, where the window has not left their blocks behind."""
        chunk_tokens, failed = self.model.chunk_tokens, state.failed.get(index, set())
        chunks, tables = [], {group: [] for group in kind.blocks}
        for chunk in sorted(chunk for chunk in failed if chunk < full):
            failed.discard(chunk)
            blocks = {
                group: table[group][chunk * chunk_tokens // size : (chunk + 1) * chunk_tokens // size]
                for group, size in kind.blocks.items()
            }
            if any(NULL in of_group for of_group in blocks.values()):
                continue
            chunks.append(chunk)
            for group, of_group in blocks.items():
                self.blocks.touch(of_group)
                tables[group].extend(of_group)
        return chunks, tables

    def snapshot(self, state, index, kind, full, offers):
        """Of states that vLLM offers with this step: those at the prompt's end, where prompts part, and at a regular
        distance. One is whole only with all groups."""
        chunk_tokens = self.model.chunk_tokens
        found = {}
        for group, block, tokens in offers:
            if group in kind.blocks and block != NULL and tokens > 0 and tokens % chunk_tokens == 0:
                found.setdefault(tokens // chunk_tokens, {})[group] = [block]
        chunks, tables = [], {group: [] for group in kind.blocks}
        for boundary, blocks in sorted(found.items()):
            is_new = boundary - 1 not in state.snapshots.setdefault(index, set())
            if not is_new or boundary > full or len(blocks) < len(kind.blocks) or not self.is_kept(state, boundary):
                continue
            state.snapshots[index].add(boundary - 1)
            chunks.append(boundary - 1)
            for group, block in blocks.items():
                tables[group].extend(block)
        return chunks, tables

    def is_kept(self, state, boundary):
        request, tokens = state.request, boundary * self.model.chunk_tokens
        if boundary % self.state_every == 0:
            return True
        # Of what is generated vLLM may offer one for each block.
        is_end = 0 <= request.num_prompt_tokens - tokens <= self.model.chunk_tokens * (1 + self.model.drops_last)
        return is_end or tokens == getattr(request, "shared_prefix_boundary", None)

    def ended(self, job, ranks, there):
        """So many ranks have ended a store. Answers it once all have."""
        store = self.open.get(job)
        if store is None:
            return None
        store.ranks += ranks
        store.there &= there
        return self.open.pop(job) if store.ranks == self.blocks.ranks else None
