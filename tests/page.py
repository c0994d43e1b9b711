#!/usr/bin/env python3
"""The status page in a real Chromium, with a real daemon that engines use: what it shows, in both colour schemes, on a wide and
on a narrow screen, from a keyboard, and by axe's rules of accessibility.

tests/page.py [--save docs/images]     with the tools of tests/servers/install.sh python page

KVGATE_TEST_BIN names the program, KVGATE_TEST_PYTHON a Python that has the wheel: it is the engine. `--save` writes the pictures
of docs/OPERATING.md.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pty
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
import urllib.request
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
KVGATE = Path(os.environ.get("KVGATE_TEST_BIN", ROOT / "target/debug/kvgate")).resolve()
PYTHON = os.environ.get("KVGATE_TEST_PYTHON", sys.executable)
NARROW, WIDE = {"width": 360, "height": 740}, {"width": 1280, "height": 1000}
HISTORY_STEP = 10
save = None

# A prompt is stored, and another time looked up and loaded, again and again.
ENGINE = """
import select, sys, time
import numpy as np
import kvgate
space = kvgate.space(model="Qwen/Qwen3-8B", revision="9c925d64", dtype="float16", layers=4, heads=2, head_dim=64, chunk_tokens=16)
gateway, numbers = kvgate.connect(sys.argv[1]), np.random.default_rng(1)
prompts, seconds = [], float(sys.argv[2])
kv = np.zeros((4, 2, 512, 2, 64), np.float16)
end, is_told = time.monotonic() + seconds, False
# Until its standard input ends.
while not select.select([sys.stdin], [], [], 0.1)[0]:
    prompts.append(numbers.integers(0, 100_000, 512).tolist())
    gateway.store_from(space, prompts[-1], kv)
    tokens = prompts[int(numbers.integers(max(0, len(prompts) - 30), len(prompts)))]
    gateway.load_into(gateway.lookup(space, tokens), kv)
    gateway.lookup(space, numbers.integers(0, 100_000, 512).tolist())
    if not is_told and time.monotonic() > end:
        print("there is something to see", flush=True)
        is_told = True
"""


def until(page, expression, seconds=60):
    """The page's policy lets nobody evaluate strings, so the page is asked from outside."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        if time.monotonic() > end:
            raise AssertionError(f"it does not come to pass: {expression}")
        page.wait_for_timeout(50)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Node:
    def __init__(self, folder, **settings):
        self.folder, self.port = Path(folder), free_port()
        self.socket = self.folder / "kvgate.sock"
        self.arena = Path(f"/dev/shm/kvgate-page-{os.getpid()}-{self.port}")
        self.log = self.folder / "kvgate.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE__")}
        command = [
            KVGATE,
            "serve",
            "--socket",
            self.socket,
            "--listen",
            f"127.0.0.1:{self.port}",
            "--arena-path",
            self.arena,
        ]
        s3 = [] if "KVGATE__S3__ENDPOINT" in settings else ["--embedded", self.folder / "objects"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, *s3], env={**environment, **settings}, stdout=log, stderr=log)
        self.url = f"http://127.0.0.1:{self.port}/"
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.url + "healthz").read()
                return
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.05)

    def get(self, path):
        return json.load(urllib.request.urlopen(self.url + path))

    def end(self):
        self.process.terminate()
        self.process.wait(60)
        self.arena.unlink(missing_ok=True)


class Browser:
    """A Chromium for all tests. What it says on its console, and what it asks for, is kept."""

    def __init__(self):
        self.playwright = sync_playwright().start()
        program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        self.chromium = self.playwright.chromium.launch(executable_path=program, args=arguments)
        self.said, self.asked = [], []

    def page(self, url, scheme="light", size=WIDE):
        page = self.chromium.new_page(color_scheme=scheme, viewport=size)
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("requestfailed", lambda request: self.said.append(f"{request.url} failed"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(url)
        until(page, "document.getElementById('cards').children.length > 0")
        return page

    def end(self):
        self.chromium.close()
        self.playwright.stop()


def setUpModule():
    global browser
    browser = Browser()
    unittest.addModuleCleanup(browser.end)


class Case(unittest.TestCase):
    def setUp(self):
        browser.said.clear()
        browser.asked.clear()

    def page(self, *how, **more):
        page = browser.page(*how, **more)
        self.addCleanup(page.close)
        return page

    def quiet(self, node):
        self.assertEqual(browser.said, [])
        self.assertEqual([url for url in browser.asked if not url.startswith((node.url, "data:"))], [])

    def accessible(self, page):
        found = Axe().run(page).response["violations"]
        bad = [f"{one['impact']} {one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]
        self.assertEqual([one for one in bad if one.startswith(("serious", "critical"))], [], bad)

    def picture(self, page, name, full=False):
        if save is not None:
            page.screenshot(path=save / f"{name}.png", full_page=full)


class UsedTest(Case):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.mkdtemp(prefix="kvgate-page-")
        cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
        disk = Path(folder, "disk")
        disk.mkdir()
        cls.node = Node(folder, KVGATE__DISK__PATHS=str(disk), KVGATE__DISK__SIZE="1GiB")
        cls.addClassCleanup(cls.node.end)
        command = [
            PYTHON,
            "-c",
            ENGINE,
            cls.node.socket,
            str(2.5 * HISTORY_STEP if save is None else 30 * HISTORY_STEP),
        ]
        cls.engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        cls.addClassCleanup(cls.engine.stdout.close)
        cls.addClassCleanup(cls.engine.wait)
        cls.addClassCleanup(cls.engine.stdin.close)
        if cls.engine.stdout.readline() != "there is something to see\n":
            raise RuntimeError("the engine failed, see above")

    def test_it_shows_what_the_node_does(self):
        page = self.page(self.node.url)
        self.assertEqual(page.locator("#state").inner_text(), "ready")
        self.assertTrue(page.locator("#troubles").is_hidden())
        cards = page.locator("#cards").inner_text()
        self.assertRegex(cards, r"memory [1-9][\d.]* %, disk [\d.]+ %, peers [\d.]+ %, S3")
        self.assertIn("loaded by engines", cards)
        charts = page.locator("#charts svg")
        self.assertEqual(charts.count(), 4)
        self.assertRegex(charts.nth(0).get_attribute("aria-label"), r"memory: now .*/s, at most [1-9]")
        self.assertRegex(
            charts.nth(2).get_attribute("aria-label"), r"lookup: now ([\d.]+ (µs|ms|s)|\u2013), at most [1-9]"
        )
        self.assertIn("L", charts.nth(3).locator("path").first.get_attribute("d"), "a line of two rows at least")
        self.assertIn("Qwen/Qwen3-8B", page.locator("#spaces").inner_text())
        self.assertIn("python-", page.locator("#sessions").inner_text())
        self.assertIn("in use", page.locator("#endpoints").inner_text())
        self.assertIn(str(self.node.folder), page.locator("#disks").inner_text())
        self.quiet(self.node)

    def test_it_is_live(self):
        page = self.page(self.node.url)
        before = page.locator("#uptime").inner_text()
        until(page, f"document.getElementById('uptime').textContent !== {json.dumps(before)}")

    def test_schemes_screens_and_axe(self):
        colours = set()
        for scheme in ("light", "dark"):
            for name, size in (("wide", WIDE), ("narrow", NARROW)):
                with self.subTest(scheme=scheme, screen=name):
                    page = self.page(self.node.url, scheme, size)
                    self.accessible(page)
                    overflow = page.evaluate(
                        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                    )
                    self.assertLessEqual(overflow, 0, "it scrolls sideways")
                    colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                    if name == "wide" or scheme == "light":
                        self.picture(
                            page, f"status-{scheme}" if name == "wide" else "status-narrow", full=name == "wide"
                        )
        self.assertEqual(len(colours), 2)
        self.quiet(self.node)

    def test_tables_are_reached_and_scrolled_by_keyboard(self):
        page = self.page(self.node.url, size=NARROW)
        names = []
        for _ in range(6):
            page.keyboard.press("Tab")
            names.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
        self.assertEqual(names[:4], ["Addresses of S3", "Disks", "Engines", "Spaces"])
        page.locator("[aria-label=Spaces]").focus()
        page.keyboard.press("ArrowRight")
        until(page, "document.activeElement.scrollLeft > 0")
        # Refreshed, it is where it was.
        uptime = page.locator("#uptime").inner_text()
        until(page, f"document.getElementById('uptime').textContent !== {json.dumps(uptime)}")
        self.assertEqual(page.evaluate("document.activeElement.getAttribute('aria-label')"), "Spaces")
        self.assertGreater(page.evaluate("document.activeElement.scrollLeft"), 0)

    def test_the_history_is_that_of_the_counters(self):
        history = self.node.get("v1/history")
        self.assertGreaterEqual(len(history["at_ms"]), 2)
        for name, column in history["columns"].items():
            self.assertEqual(len(column), len(history["at_ms"]), name)
        self.assertGreater(sum(filter(None, history["columns"]["loaded_bytes_memory"])), 0)

    def test_a_probe_that_is_not_supported_is_no_failure(self):
        (endpoint,) = self.node.get("v1/status")["s3"]["endpoints"]
        self.assertEqual((endpoint["failed"], endpoint["lost"]), (0, 0))

    def test_top_shows_the_same(self):
        command = [KVGATE, "top", "--socket", self.node.socket]
        shown = subprocess.run([*command, "--once"], capture_output=True, text=True, check=True).stdout
        for words in ("ready", "Qwen/Qwen3-8B", "memory", "python-", "127.0.0.1:"):
            self.assertIn(words, shown)
        told = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
        self.assertEqual(set(told), {"status", "history"})

    def test_top_in_a_terminal_ends_with_q_and_leaves_it_as_it_was(self):
        for ending in (b"q", b"\x03"):
            pid, terminal = pty.fork()
            if pid == 0:
                os.execv(KVGATE, [str(KVGATE), "top", "--socket", str(self.node.socket)])
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
            shown = b""
            while shown.count(b"kvgate ") < 2:
                shown += os.read(terminal, 65536)
            os.write(terminal, ending)
            with contextlib.suppress(OSError):
                while more := os.read(terminal, 65536):
                    shown += more
            os.close(terminal)
            self.assertEqual(os.waitpid(pid, 0)[1], 0, shown)
            # The other screen and no cursor, and both back.
            for sequence in (b"\x1b[?1049h", b"\x1b[?25l", b"\x1b[?25h", b"\x1b[?1049l"):
                self.assertEqual(shown.count(sequence), 1, sequence)


class TroubleTest(Case):
    def test_what_is_red_says_what_to_do(self):
        with tempfile.TemporaryDirectory(prefix="kvgate-page-") as folder:
            # Nobody listens there.
            dead = f"http://127.0.0.1:{free_port()}"
            keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            node = Node(folder, KVGATE__S3__ENDPOINT=dead, KVGATE__S3__BUCKET="none", KVGATE__S3__RETRIES="0", **keys)
            try:
                page = self.page(node.url)
                until(page, "document.querySelectorAll('#troubles li').length > 1")
                self.assertIn("not ready: S3 has not answered yet", page.locator("#state").inner_text())
                words = page.locator("#troubles").inner_text()
                self.assertIn("Broken: S3 has not answered since the start", words)
                self.assertIn("Broken: All addresses of S3 fail", words)
                self.assertIn("kvgate doctor", words)
                self.accessible(page)
                self.picture(page, "status-trouble")
                stat = subprocess.run([KVGATE, "stat", "--socket", node.socket], capture_output=True, text=True).stdout
                self.assertIn("S3 has not answered since the start", stat)
                top = subprocess.run(
                    [KVGATE, "top", "--once", "--socket", node.socket], capture_output=True, text=True
                ).stdout
                self.assertIn("S3 has not answered since the start", top)
                self.quiet(node)
                browser.said.clear()
                node.end()
                until(page, "document.getElementById('state').textContent.includes('does not answer')")
            finally:
                if node.process.poll() is None:
                    node.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="a folder for pictures; takes 5 minutes")
    known, rest = parser.parse_known_args()
    save = known.save
    unittest.main(argv=[sys.argv[0], *rest])
