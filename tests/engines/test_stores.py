"""What is stored after a step, of each kind of KV.

python tests/engines/test_stores.py     in an environment with vLLM and the wheel
"""

import itertools
import unittest

from kvgate import Prompt
from kvgate.vllm.blocks import NULL, Blocks
from kvgate.vllm.scheduler import RequestState
from kvgate.vllm.stores import Stores
from made_up import CHUNK, Pool, kind, model, request

FULL, WINDOW, STATE = 0, 1, 2
"""Groups, and so kinds where each has one."""


class StoresCase(unittest.TestCase):
    """Chunks of 8 tokens in blocks of 4."""

    kinds = ()
    tokens = 40
    state_every = 100
    drops_last = False
    ranks = 1

    def setUp(self):
        self.model = model(*(kind(word, span, blocks) for word, span, blocks in self.kinds), drops_last=self.drops_last)
        self.pool, self.blocks = Pool(), Blocks(self.ranks)
        self.blocks.bind(self.pool)
        self.stores = Stores(self.model, self.blocks, None, itertools.count(), self.state_every)
        self.state = self.add()

    def add(self, name="r", **more):
        one = request(name, range(self.tokens), **more)
        prompt = Prompt(self.model.spaces[0])
        prompt.extend(one.all_token_ids)
        nothing = [0] * len(self.model.kinds)
        return RequestState(one, prompt, list(nothing), list(nothing))

    def step(self, tokens, *tables, offers=(), sure=None):
        """After so many tokens are known; `sure`: so many of them are right. What is stored: the kind, the chunks, and the
        blocks by group."""
        full = (tokens if sure is None else sure) // CHUNK
        tables = [list(table) for table in tables]
        self.store = self.stores.of_step(self.state, tables, full, tokens, offers)
        if self.store is None:
            return []
        return [(part.kind, part.chunks, part.tables) for part in self.store.parts]

    def ended(self, *there, ranks=1):
        return self.stores.ended(self.store.job, ranks, set(there))


class PrefixTest(StoresCase):
    table = tuple(range(10, 20))

    def test_chunks_that_are_full_are_stored_once(self):
        self.assertEqual(self.step(7, self.table), [])
        self.assertEqual(self.step(23, self.table), [(0, [0, 1], {0: [10, 11, 12, 13]})])
        self.assertEqual(self.step(23, self.table), [])
        self.assertEqual(self.step(24, self.table), [(0, [2], {0: [14, 15]})])
        self.assertEqual(self.pool.held(), dict.fromkeys(range(10, 16), 1))

    def test_what_was_found_is_not(self):
        self.state.found = [2]
        self.assertEqual(self.step(16, self.table), [])
        self.assertEqual(self.step(24, self.table), [(0, [2], {0: [14, 15]})])

    def test_what_did_not_get_there_is_handed_again_with_the_next_that_is_full(self):
        self.step(16, self.table)
        self.state.found = [1]
        self.assertEqual(self.step(20, self.table), [])
        self.assertEqual(self.step(24, self.table), [(0, [1, 2], {0: [12, 13, 14, 15]})])

    def test_what_is_in_doubt_waits(self):
        self.assertEqual(self.step(24, self.table, sure=12), [(0, [0], {0: [10, 11]})])
        self.assertEqual(self.step(25, self.table), [(0, [1, 2], {0: [12, 13, 14, 15]})])

    def test_each_chunk_has_its_hash_and_its_parent(self):
        self.state.found = [1]
        self.step(24, self.table)
        (part,) = self.store.parts
        prompt = self.state.prompt
        self.assertEqual((part.hashes, part.parents), (prompt.hashes(1, 3), prompt.hashes(0, 2)))


class RanksTest(StoresCase):
    ranks = 2

    def test_what_is_there_is_there_for_all(self):
        self.step(16, range(10, 20))
        self.assertIsNone(self.ended((0, 0), (0, 1)))
        store = self.ended((0, 1))
        self.assertEqual((store.request, store.parts, store.there), ("r", [(0, [0, 1])], {(0, 1)}))
        self.assertEqual((self.ended((0, 1)), self.stores.open), (None, {}))

    def test_a_store_that_nobody_knows_says_nothing(self):
        self.assertIsNone(self.stores.ended("other", 1, set()))


class GroupsTest(StoresCase):
    """vLLM deals the layers of one kind into two groups, whose blocks are of two sizes."""

    kinds = (("full", 0, {0: 4, 1: 8}),)

    def test_a_chunk_has_the_blocks_of_all_groups(self):
        stored = self.step(16, range(10, 20), range(30, 35))
        self.assertEqual(stored, [(0, [0, 1], {0: [10, 11, 12, 13], 1: [30, 31]})])
        self.assertEqual(self.pool.held(), dict.fromkeys([10, 11, 12, 13, 30, 31], 1))


class WindowTest(StoresCase):
    """The last 6 tokens in group 1."""

    kinds = (("full", 0, {0: 4}), ("window", 6, {1: 4}))

    def windows(self, tokens, table, **more):
        return [part for part in self.step(tokens, range(10, 20), table, **more) if part[0] == WINDOW]

    def test_blocks_are_kept_until_their_chunk_is_full(self):
        self.assertEqual(self.windows(4, [30]), [])
        self.assertEqual(self.pool.held(), {30: 1})
        # vLLM has given the first to somebody else by then.
        self.assertEqual(self.windows(11, [NULL, 31, 32]), [(WINDOW, [0], {1: [30, 31]})])
        self.assertEqual({block: self.pool.held().get(block) for block in (30, 31, 32)}, {30: 1, 31: 1, 32: None})

    def test_both_kinds_are_one_store(self):
        self.assertEqual(self.step(8, [10, 11], [30, 31]), [(FULL, [0], {0: [10, 11]}), (WINDOW, [0], {1: [30, 31]})])
        self.assertEqual(self.pool.held(), dict.fromkeys([10, 11, 30, 31], 1))
        self.blocks.freed({self.store.job: 1})
        self.assertEqual(self.pool.held(), {})

    def test_a_chunk_with_a_block_that_is_not_there_is_left_out(self):
        self.assertEqual(self.windows(16, [NULL, 31, 32, 33]), [(WINDOW, [1], {1: [32, 33]})])
        self.assertEqual(self.pool.held().get(31), None)
        self.assertEqual(self.windows(16, [NULL, 31, 32, 33]), [])

    def test_what_vllm_wanted_back_is_left_out(self):
        self.windows(4, [30])
        self.assertEqual(self.blocks.give_back(), (True, set()))
        self.assertEqual(self.windows(16, [30, 31, 32, 33]), [(WINDOW, [1], {1: [32, 33]})])

    def test_what_was_found_is_not_kept(self):
        self.state.found = [1, 1]
        self.assertEqual(self.windows(16, [NULL, 31, 32, 33]), [(WINDOW, [1], {1: [32, 33]})])

    def test_what_did_not_get_there_is_stored_once_more_while_its_blocks_are_there(self):
        self.windows(24, [30, 31, 32, 33, 34, 35])
        self.blocks.freed({self.store.job: 1})
        self.state.failed = {WINDOW: {0, 2, 3}}
        # The window has left the first chunk's blocks behind, and the last one is not full.
        self.assertEqual(self.windows(25, [NULL, NULL, NULL, 33, 34, 35, 36]), [(WINDOW, [2], {1: [34, 35]})])
        self.assertEqual(self.state.failed, {WINDOW: {3}})
        self.blocks.freed({self.store.job: 1})
        self.blocks.drop("r")
        self.assertEqual(self.pool.held(), {})

    def test_what_is_in_doubt_is_kept(self):
        self.assertEqual(self.windows(8, [30, 31], sure=0), [])
        self.assertEqual(self.pool.held(), {30: 1, 31: 1})
        self.assertEqual(self.windows(12, [NULL, NULL, 32]), [(WINDOW, [0], {1: [30, 31]})])

    def test_a_request_that_goes_leaves_nothing(self):
        self.windows(4, [30])
        self.blocks.drop("r")
        self.assertEqual(self.pool.held(), {})


class DraftTest(StoresCase):
    def setUp(self):
        super().setUp()
        self.model = model(kind(), kind(is_draft=True))
        self.stores.model = self.model
        self.state = self.add()

    def test_a_request_whose_drafts_kv_did_not_come_stores_none_of_it(self):
        self.assertEqual([part[0] for part in self.step(8, [10, 11])], [0, 1])
        self.state.has_drafts = False
        self.assertEqual([part[0] for part in self.step(16, [10, 11, 12, 13])], [0])


class SnapshotTest(StoresCase):
    """States of one kind in groups 1 and 2, in blocks of 8 tokens; a prompt of 40 tokens."""

    kinds = (("full", 0, {0: 4}), ("state", 0, {1: 8, 2: 8}))

    def snapshots(self, tokens, *offers, **more):
        stored = self.step(tokens, range(10, 20), (), (), offers=offers, **more)
        return [(chunks, tables) for kind, chunks, tables in stored if kind == 1]

    def test_one_that_is_offered_is_stored_once(self):
        offers = ((1, 30, 32), (2, 31, 32))
        self.assertEqual(self.snapshots(32, *offers), [([3], {1: [30], 2: [31]})])
        self.assertEqual(self.pool.held()[30], 1)
        self.assertEqual(self.snapshots(33, *offers), [])

    def test_it_is_the_chunk_that_it_comes_after(self):
        self.snapshots(32, (1, 30, 32), (2, 31, 32))
        part = self.store.parts[-1]
        prompt = self.state.prompt
        self.assertEqual((part.hashes, part.parents), (prompt.hashes(3, 4), prompt.hashes(2, 3)))

    def test_all_groups_or_none(self):
        self.assertEqual(self.snapshots(32, (1, 30, 32)), [])
        self.assertEqual(self.snapshots(40, (1, 30, 32), (2, 31, 40)), [])
        self.assertNotIn(30, self.pool.held())
        self.assertEqual(self.snapshots(40, (1, 30, 32), (2, 31, 32)), [([3], {1: [30], 2: [31]})])

    def test_what_is_no_snapshot_is_left_out(self):
        for *offers, why in (
            ((1, NULL, 32), (2, 31, 32), "the null block"),
            ((1, 30, 0), (2, 31, 0), "before the prompt"),
            ((1, 30, 36), (2, 31, 36), "within a chunk"),
            ((0, 30, 32), (5, 31, 32), "of other groups"),
        ):
            self.assertEqual(self.snapshots(40, *offers), [], why)

    def test_not_past_what_is_known(self):
        offers = ((1, 30, 40), (2, 31, 40))
        self.assertEqual(self.snapshots(39, *offers), [])
        self.assertEqual(self.snapshots(40, *offers, sure=36), [])
        self.assertEqual(self.snapshots(40, *offers), [([4], {1: [30], 2: [31]})])

    def test_those_before_the_prompt_s_end_are_left_out(self):
        self.assertEqual(self.snapshots(24, (1, 30, 24), (2, 31, 24)), [])

    def test_where_prompts_part_one_is_stored(self):
        self.state.request.shared_prefix_boundary = 16
        offers = ((1, 30, 16), (2, 31, 16), (1, 32, 24), (2, 33, 24))
        self.assertEqual(self.snapshots(24, *offers), [([1], {1: [30], 2: [31]})])

    def test_one_that_did_not_get_there_is_stored_when_it_is_offered_again(self):
        offers = ((1, 30, 32), (2, 31, 32))
        self.snapshots(32, *offers)
        self.state.snapshots[1].discard(3)
        self.assertEqual(self.snapshots(33, *offers), [([3], {1: [30], 2: [31]})])

    def test_its_blocks_are_held_until_they_are_copied(self):
        self.snapshots(32, (1, 30, 32), (2, 31, 32))
        self.blocks.drop("r")
        self.assertEqual((self.pool.held()[30], self.pool.held()[31]), (1, 1))
        self.blocks.freed({self.store.job: 1})
        self.assertEqual(self.pool.held(), {})


class SpacingTest(StoresCase):
    """Every second chunk, of a prompt of 42 tokens."""

    kinds = (("state", 0, {0: 8}),)
    tokens, state_every = 42, 2

    def boundaries(self, *tokens):
        """Of those offered, the stored ones."""
        offers = [(0, 20 + at // CHUNK, at) for at in tokens]
        stored = self.step(max(tokens), (), offers=offers)
        return [(chunk + 1) * CHUNK for _, chunks, _ in stored for chunk in chunks]

    def test_the_regular_ones_and_the_prompt_s_end(self):
        self.assertEqual(self.boundaries(8, 16, 24, 32, 40), [16, 32, 40])

    def test_a_prompt_that_ends_with_a_chunk_has_the_one_before_too(self):
        """A token is always left to compute: who sends the same prompt again hits there."""
        self.state.request.num_prompt_tokens = 40
        self.stores.state_every = 100
        self.assertEqual(self.boundaries(8, 16, 24, 32, 40), [32, 40])

    def test_of_what_is_generated_only_the_regular_ones(self):
        self.state.request.num_prompt_tokens = 10
        self.assertEqual(self.boundaries(8, 16, 24, 32, 40), [8, 16, 32])


class DroppedTest(SpacingTest):
    """With drafts vLLM drops the last chunk of a hit, so the snapshot before is wanted, too."""

    drops_last, state_every = True, 100

    def test_the_regular_ones_and_the_prompt_s_end(self):
        self.assertEqual(self.boundaries(8, 16, 24, 32, 40), [32, 40])

    def test_a_prompt_that_ends_with_a_chunk_has_the_one_before_too(self):
        self.state.request.num_prompt_tokens = 40
        self.assertEqual(self.boundaries(8, 16, 24, 32, 40), [24, 32, 40])

    def test_of_what_is_generated_only_the_regular_ones(self):
        self.state.request.num_prompt_tokens = 10
        self.stores.state_every = 4
        self.assertEqual(self.boundaries(8, 16, 24, 32, 40), [8, 32])


if __name__ == "__main__":
    unittest.main(verbosity=2)
