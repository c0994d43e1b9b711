"""The command line: the same program as the Rust binary."""

import signal
import sys

from kvgate import _native


def main():
    # Rust handles Ctrl-C and SIGTERM itself. SIGPIPE stays ignored: a daemon outlives clients that go.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
