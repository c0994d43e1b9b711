"""References to vLLM's blocks: each is given back once, whatever happens.

python tests/engines/test_blocks.py     in an environment with vLLM and the wheel
"""

import unittest

from kvgate.vllm.blocks import NULL, Blocks
from made_up import Pool

PLACE = (1, 0)
"""A kind and a group."""


class BlocksCase(unittest.TestCase):
    ranks = 1

    def setUp(self):
        self.pool, self.blocks = Pool(), Blocks(self.ranks)
        self.blocks.bind(self.pool)

    def keep(self, *table, first=0, request="r", place=PLACE):
        """All blocks of a table are full."""
        self.blocks.keep(request, place, first, list(table), len(table))

    def take(self, first, end, request="r", place=PLACE):
        return self.blocks.take(request, place, first, end)


class CopyTest(BlocksCase):
    ranks = 2

    def test_a_block_is_held_until_all_ranks_need_it_no_more(self):
        self.blocks.copy("s", [1, 2], [])
        self.assertEqual(self.pool.held(), {1: 1, 2: 1})
        self.blocks.freed({"s": 1})
        self.assertEqual((self.pool.held(), "s" in self.blocks.copied), ({1: 1, 2: 1}, True))
        self.blocks.freed({"s": 1})
        self.assertEqual((self.pool.held(), "s" in self.blocks.copied), ({}, False))

    def test_ranks_that_tell_together_count_both(self):
        self.blocks.copy("s", [1], [])
        self.blocks.freed({"s": 2})
        self.assertEqual(self.pool.held(), {})

    def test_the_beginning_of_a_prompt_comes_free_last(self):
        self.blocks.copy("s", [5, 3, 4], [])
        self.blocks.freed({"s": 2})
        self.assertEqual(self.pool.freed, [4, 3, 5])

    def test_two_stores_hold_a_block_twice(self):
        self.blocks.copy("one", [1], [])
        self.blocks.copy("other", [1, 2], [])
        self.blocks.freed({"one": 2})
        self.assertEqual(self.pool.held(), {1: 1, 2: 1})

    def test_a_store_that_nobody_knows_frees_nothing(self):
        self.blocks.copy("s", [1], [])
        self.blocks.freed({"other": 2})
        self.blocks.freed({"s": 2})
        self.blocks.freed({"s": 2})
        self.assertEqual(self.pool.held(), {})

    def test_the_null_block_is_nobody_s(self):
        self.blocks.copy("s", [NULL, 1], [])
        self.assertEqual(self.pool.held(), {1: 1})
        self.blocks.freed({"s": 2})
        self.assertEqual(self.pool.freed, [1])


class KeepTest(BlocksCase):
    def test_what_is_taken_is_a_store_s(self):
        self.keep(1, 2, 3)
        self.assertEqual(self.pool.held(), {1: 1, 2: 1, 3: 1})
        taken = self.take(0, 2)
        self.assertEqual(taken, [1, 2])
        self.blocks.copy("s", [], taken)
        self.assertEqual(self.pool.held(), {1: 1, 2: 1, 3: 1})
        self.blocks.freed({"s": 1})
        self.assertEqual(self.pool.held(), {3: 1})

    def test_each_block_is_kept_once_and_as_it_was_when_it_was_full(self):
        self.keep(1, 2)
        # The window has left the first behind.
        self.keep(NULL, NULL, 3)
        self.assertEqual(self.pool.held(), {1: 1, 2: 1, 3: 1})
        self.assertEqual(self.take(0, 3), [1, 2, 3])

    def test_only_full_blocks_are_kept(self):
        self.blocks.keep("r", PLACE, 0, [1, 2, 3], 2)
        self.assertEqual(self.pool.held(), {1: 1, 2: 1})

    def test_what_is_before_the_first_is_left(self):
        self.keep(1, 2, 3, 4, first=2)
        self.assertEqual(self.pool.held(), {3: 1, 4: 1})
        self.assertEqual(self.take(2, 4), [3, 4])

    def test_a_chunk_that_is_not_full_stays(self):
        self.keep(1, 2, 3)
        self.assertIsNone(self.take(2, 4))
        self.assertEqual(self.pool.held(), {1: 1, 2: 1, 3: 1})
        self.keep(NULL, NULL, NULL, 4)
        self.assertEqual(self.take(2, 4), [3, 4])
        self.assertEqual(self.pool.held(), {3: 1, 4: 1}, "those before are given back")

    def test_a_chunk_of_which_a_block_is_null_is_given_back(self):
        self.keep(NULL, 2, 3, 4)
        self.assertIsNone(self.take(0, 2))
        self.assertEqual(self.pool.held(), {3: 1, 4: 1})
        self.assertEqual(self.take(2, 4), [3, 4])

    def test_nothing_is_taken_twice(self):
        self.keep(1, 2, 3, 4)
        self.blocks.copy("s", [], self.take(0, 4))
        for first, end in ((0, 2), (2, 4), (1, 6)):
            self.assertIsNone(self.take(first, end))
        self.keep(1, 2, 3, 4, 5, 6)
        self.assertIsNone(self.take(2, 6), "a part of it is a store's")
        self.assertEqual(self.take(4, 6), [5, 6])
        self.assertEqual(self.pool.held(), dict.fromkeys(range(1, 7), 1))

    def test_what_was_never_kept_is_not_there(self):
        self.assertIsNone(self.take(0, 1))

    def test_groups_and_requests_are_apart(self):
        self.keep(1, place=(1, 0))
        self.keep(2, place=(1, 3))
        self.keep(3, request="other")
        self.assertEqual(self.take(0, 1, place=(1, 3)), [2])
        self.blocks.drop("r")
        self.assertEqual(self.pool.held(), {2: 1, 3: 1})

    def test_nothing_is_kept_of_a_request_that_is_gone(self):
        self.keep(1, NULL, 3)
        self.blocks.drop("r")
        self.blocks.drop("r")
        self.assertEqual((self.pool.held(), self.blocks.kept), ({}, {}))

    def test_a_store_outlives_its_request(self):
        self.keep(1, 2)
        self.blocks.copy("s", [], self.take(0, 1))
        self.blocks.drop("r")
        self.assertEqual(self.pool.held(), {1: 1})


class PressureTest(BlocksCase):
    """vLLM lacks blocks."""

    def test_what_vllm_has_itself_is_no_gain(self):
        self.pool.take(1, 2)
        self.keep(1)
        self.blocks.copy("s", [2], [])
        self.assertEqual(self.blocks.give_back(), (False, set()))
        self.assertEqual(self.pool.held(), {1: 2, 2: 2})

    def test_what_is_only_kept_is_given_back_at_once(self):
        self.pool.take(2)
        self.keep(1, 2)
        self.assertEqual(self.blocks.give_back(), (True, set()))
        self.assertEqual(self.pool.held(), {2: 1})
        self.assertEqual(self.blocks.give_back(), (False, set()))

    def test_the_chunk_it_was_of_is_not_stored_and_the_next_is(self):
        self.keep(1)
        self.blocks.give_back()
        self.keep(NULL, 2, 3, 4)
        self.assertIsNone(self.take(0, 2))
        self.assertEqual(self.take(2, 4), [3, 4])
        self.assertEqual(self.pool.held(), {3: 1, 4: 1})

    def test_stores_that_alone_hold_blocks_are_told(self):
        self.pool.take(1)
        self.blocks.copy("runs", [1], [])
        self.blocks.copy("alone", [2], [])
        self.blocks.copy("partly", [1, 3], [])
        self.assertEqual(self.blocks.give_back(), (False, {"alone", "partly"}))
        # Only the workers know when nobody reads them any more.
        self.assertEqual(self.pool.held(), {1: 3, 2: 1, 3: 1})

    def test_given_up_all_but_what_workers_know_of_is_vllm_s(self):
        self.blocks.copy("told", [1], [])
        self.blocks.told()
        self.blocks.copy("new", [2], [])
        self.keep(3)
        for _ in range(2):
            self.blocks.give_up()
            self.assertEqual(self.pool.held(), {1: 1})
        self.blocks.freed({"told": 1, "new": 1})
        self.assertEqual(self.pool.held(), {})

    def test_a_reset_is_not_held_up_by_kept_and_copied_blocks(self):
        """vLLM resets only while nobody has a block, and throws where it had preempted all requests for it."""
        self.keep(1)
        self.assertTrue(self.pool.reset_prefix_cache())
        self.blocks.copy("s", [2], [])
        self.assertTrue(self.pool.reset_prefix_cache())
        # The copy goes on: its block is held again.
        self.assertEqual((self.pool.held(), self.pool.resets), ({2: 1}, 2))


if __name__ == "__main__":
    unittest.main(verbosity=2)
