"""Thousands of random histories of vLLM's scheduler with the connector. See histories.py.

python tests/engines/test_histories.py      in an environment with vLLM and the wheel
"""

import logging
import os
import sys
import traceback
import unittest
from types import SimpleNamespace
from unittest import mock

import histories
import stand_ins
from histories import History, Overtaken
from kvgate.vllm import model
from kvgate.vllm.blocks import Blocks, Kept
from kvgate.vllm.connector import KvGateConnector
from kvgate.vllm.scheduler import SchedulerSide
from kvgate.vllm.stores import Stores
from stand_ins import BrokenError
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

HISTORIES = 500_000 if os.environ.get("KVGATE_TEST_FULL") else 20_000
if share := os.environ.get("KVGATE_TEST_HISTORIES_SHARE"):
    HISTORIES //= int(share)
PLANTED = 1_000
"""Among so many a mistake must be found."""
AGAIN = f"PYTHONHASHSEED=0 {sys.executable} tests/engines/histories.py"


def first_broken(seeds):
    """The first of these histories that breaks, and how."""
    logging.disable(logging.CRITICAL)
    for seed in seeds:
        try:
            History(seed).run()
        except Exception:
            return f"{traceback.format_exc()}\nagain: {AGAIN} {seed}"
    return ""


def run(count):
    """Runs histories on all cores, each in a fork of this process. Returns those that broke."""
    cores = len(os.sched_getaffinity(0))
    children = []
    for core in range(cores):
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            with os.fdopen(write, "w") as file:
                file.write(first_broken(range(core, count, cores)) + "done")
            os._exit(0)
        os.close(write)
        children.append((process, read))
    said = []
    for process, read in children:
        with os.fdopen(read) as file:
            text = file.read()
        os.waitpid(process, 0)
        said.append(text.removesuffix("done") if text.endswith("done") else f"{text} a process died")
    return [text for text in said if text]


class HistoryTest(unittest.TestCase):
    def test_nothing_breaks(self):
        broken = run(HISTORIES)
        self.assertFalse(broken, "\n\n".join(broken))


class PlantedTest(unittest.TestCase):
    """The histories find mistakes that were once made."""

    def finds(self, pattern):
        broken = run(PLANTED)
        self.assertTrue(broken, "nothing broke")
        # Which of them comes first goes by the number of cores.
        self.assertRegex("\n".join(broken), pattern)

    def test_a_block_table_of_its_own(self):
        """It was not kept in steps with loads within them."""
        step = SchedulerSide.step

        def planted(self, output):
            tables = self.__dict__.setdefault("tables", {})
            cached = output.scheduled_cached_reqs
            if not output.has_sync_kv_loads:
                for new in output.scheduled_new_reqs:
                    tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
                for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
                    own = [] if name in cached.resumed_req_ids else tables.get(name, [])
                    new = new or ([],) * len(own)
                    tables[name] = [[*old, *more] for old, more in zip(own, new, strict=False)] if own else new
            output.kv_connector_block_state = SimpleNamespace(
                get_block_ids=lambda name: tables.get(name, ([],)),
                boundary_state_offloads=output.kv_connector_block_state.boundary_state_offloads,
            )
            is_producer = self.is_producer
            self.is_producer = is_producer and not output.has_sync_kv_loads
            meta = step(self, output)
            self.is_producer = is_producer
            return meta

        with (
            mock.patch.object(SchedulerSide, "step", planted),
            mock.patch.object(SchedulerSide, "note_doubts", lambda *_: None),
            mock.patch.object(History, "MODELS", ("plain",)),
        ):
            self.finds("blocks")

    def test_loads_within_a_step_that_are_taken_to_be_right(self):
        with mock.patch.object(SchedulerSide, "note_doubts", lambda *_: None):
            self.finds("wrong KV|is not empty")

    def test_blocks_that_are_not_held_while_they_are_copied(self):
        with (
            mock.patch.object(Blocks, "touch", lambda *_: None),
            mock.patch.object(Blocks, "free", lambda *_: None),
        ):
            self.finds("is free|wrong KV")

    def test_blocks_that_are_held_although_all_copies_have_ended(self):
        with mock.patch.object(Blocks, "freed", lambda *_: None):
            self.finds("blocks are lost|is preempted|can't be reset|does not end")

    def test_windows_that_are_kept_after_their_request(self):
        with mock.patch.object(Blocks, "drop", lambda *_: None):
            self.finds("blocks are lost|can't be reset|does not end")

    def test_windows_by_what_the_table_has_when_their_chunk_is_full(self):
        """vLLM has freed some of them."""

        def planted(self, request, place, first, table, end):
            kept = self.kept.setdefault(request, {}).setdefault(place, Kept(first, []))
            kept.blocks[:] = [block or 1 for block in table[kept.first : end]]
            self.touch(kept.blocks)

        with mock.patch.object(Blocks, "keep", planted):
            self.finds("wrong KV|names blocks")

    def test_states_by_their_place_in_the_table(self):
        """vLLM keeps few of them."""

        def planted(self, state, index, kind, full, offers):
            tables = stand_ins.world.scheduler.kv_cache_manager.get_block_ids(state.request.request_id)
            known = state.snapshots.setdefault(index, set())
            chunks = [chunk for chunk in range(full) if chunk not in known]
            known.update(chunks)
            places = {group: self.model.chunk_tokens // size for group, size in kind.blocks.items()}
            found = {
                group: [tables[group][(chunk + 1) * size - 1] for chunk in chunks] for group, size in places.items()
            }
            return chunks, found

        with mock.patch.object(Stores, "snapshot", planted):
            self.finds("wrong KV|null block|block 0 is free")

    def test_hits_without_a_token_left_to_compute(self):
        """vLLM steps back one token, where there is neither the window nor the state."""

        def planted(self, request):
            return request.num_tokens // self.chunk_tokens

        def all_of_it(self, request, num_computed_tokens):
            found = self.lookups.answer(request.request_id) if request.request_id in self.lookups.prompts else None
            tokens, is_async = matched(self, request, num_computed_tokens)
            return (found * self.chunk_tokens - num_computed_tokens if found and tokens else tokens), is_async

        matched = SchedulerSide.matched_tokens
        with (
            mock.patch.object(SchedulerSide, "most_chunks", planted),
            mock.patch.object(SchedulerSide, "matched_tokens", all_of_it),
            mock.patch.object(History, "MODELS", ("windows", "states")),
            mock.patch.object(stand_ins.Worker, "fails", lambda self: False),
            mock.patch.object(histories, "PROMPT_TOKENS", (12, 24)),
        ):
            self.finds("computed from is wrong|Error")

    def test_windows_of_which_not_all_is_loaded(self):
        load_part = SchedulerSide.load_part

        def planted(self, index, kind, *told):
            part = load_part(self, index, kind, *told)
            if part is not None and kind.word == "window":
                for group, ((start, end), blocks) in part.tables.items():
                    part.tables[group] = ((min(start + kind.blocks[group], end), end), blocks)
            return part

        with mock.patch.object(SchedulerSide, "load_part", planted):
            self.finds("computed from is wrong")

    def test_latents_that_are_loaded_without_what_chooses_among_them(self):
        load_part = SchedulerSide.load_part

        def planted(self, index, *told):
            return load_part(self, index, *told) if index == 0 else None

        with (
            mock.patch.object(SchedulerSide, "load_part", planted),
            mock.patch.object(History, "MODELS", ("latents",)),
        ):
            self.finds("computed from is wrong")

    def test_blocks_of_one_rank_where_tokens_are_dealt_to_several(self):
        with (
            mock.patch.object(model, "block_tokens", lambda spec, parallel: spec.block_size),
            mock.patch.object(History, "MODELS", ("plain",)),
            mock.patch.object(History, "DEALT", 1),
        ):
            self.finds("names blocks|Error")

    def test_failed_loads_that_are_asked_for_again_at_once(self):
        note = SchedulerSide.note_failure

        def planted(self, state, failed_blocks, is_whole):
            note(self, state, failed_blocks, is_whole)
            state.lost = None

        with (
            mock.patch.object(SchedulerSide, "note_failure", planted),
            mock.patch.object(History, "MODELS", ("windows",)),
            mock.patch.object(stand_ins.Worker, "fails", lambda self: True),
        ):
            self.finds("does not end")

    def test_tokens_that_are_dropped_for_a_best_effort_cache(self):
        with mock.patch.object(KvGateConnector, "requires_kv_delivery", KVConnectorBase_V1.requires_kv_delivery):
            self.finds("tokens are dropped")

    def test_blocks_that_vllm_has_cached_and_never_computed(self):
        """It does so itself, for requests with priorities."""
        Overtaken(1).run()
        with (
            mock.patch.object(SchedulerSide, "evict_uncomputed", lambda *_: None),
            self.assertRaisesRegex(BrokenError, "computed from is wrong"),
        ):
            Overtaken(1).run()

    def test_preemption_beside_blocks_that_come_free(self):
        with mock.patch.object(KvGateConnector, "has_pending_block_frees", lambda self: False):
            self.finds("only copies hold come free")


if __name__ == "__main__":
    # Histories tell KV apart by Python's own hashes.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    print(f"vLLM {histories.vllm_version}")
    unittest.main(verbosity=2)
