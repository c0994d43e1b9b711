"""No client's trouble loses what was measured of the others:  cd bench && python3 -m unittest harness.test_rounds"""

import contextlib
import io
import unittest

from . import clients, rounds, tools
from .clients import Measured, Work

GOOD = Measured(ops=4, bytes=4096, seconds=0.5, cpu_seconds=0.25, minor_faults=1)
READ = Work("read", 1024)


class Fake:
    version = None

    def __init__(self, outcome: Measured | Exception) -> None:
        self.outcome = outcome

    def can(self, work: Work) -> bool:
        return True

    def run(self, work: Work) -> Measured:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def stop(self) -> None:
        pass


def measured(outcome: Measured | Exception) -> rounds.Samples:
    samples = rounds.Samples()
    with contextlib.redirect_stderr(io.StringIO()):
        rounds.run("nginx", {"it": Fake(outcome), "other": Fake(GOOD)}, [READ], 2, samples)
    return samples


class Rounds(unittest.TestCase):
    def test_any_trouble_is_a_failure_of_its_own(self):
        case = rounds.Case("nginx", READ.name, "it")
        for outcome, words in [
            (tools.FailedError("no"), "no"),
            (KeyError("ops"), "KeyError: 'ops'"),
            (OSError(), "OSError: "),
            (Measured(0, 0, 2.0, 0.0, 0), "0 operations, 0 bytes in 2.0 s"),
            (Measured(4, 0, 2.0, 0.0, 0), "4 operations, 0 bytes in 2.0 s"),
        ]:
            with self.subTest(words):
                samples = measured(outcome)
                self.assertEqual(samples.failures, {case: words})
                self.assertEqual([len(those) for those in samples.measured.values()], [2])

    def test_everyone_is_at_the_same_work(self):
        done = []

        class Noting(Fake):
            def run(self, work: Work) -> Measured:
                done.append((work.op, self.outcome))
                return GOOD

        those = {name: Noting(name) for name in "abc"}
        works = [READ, Work("head"), Work("write")]
        with contextlib.redirect_stderr(io.StringIO()):
            rounds.run("nginx", those, works, 2, rounds.Samples())
        self.assertEqual(len(done), 18)
        for at in range(0, 18, 3):
            self.assertEqual(len({op for op, _ in done[at : at + 3]}), 1)
            self.assertEqual({name for _, name in done[at : at + 3]}, set("abc"))
        for at in (0, 9):
            self.assertEqual({op for op, _ in done[at : at + 9]}, {"read", "head", "write"})

    def test_heads_move_no_bytes(self):
        samples = rounds.Samples()
        case = rounds.Case("nginx", "HEAD", "it")
        heads = Measured(4, 0, 2.0, 0.0, 0)
        self.assertEqual(rounds.attempt(case, Fake(heads), Work("head"), samples), heads)


class Warp(unittest.TestCase):
    def test_its_report(self):
        said = 'reading\n{"total": {"total_requests": 3, "total_bytes": 12}}\ndone'
        self.assertEqual(clients.warp_total(said), (3, 12))

    def test_another_report_is_a_failure(self):
        for said in ["", "reading", '{"total"', "{}", '{"total": {"total_bytes": 12}}', '{"total": null}']:
            with self.subTest(said), self.assertRaises(tools.FailedError):
                clients.warp_total(said)


if __name__ == "__main__":
    unittest.main()
