"""One of Swift's servers with a configuration of its own: swift_server.py SWIFT_CONF account|container|object|proxy CONF

Swift reads its secret hash suffix from /etc/swift/swift.conf and offers no setting for that path; so the path is
replaced before the server starts. Runs with Debian's Python, where Debian's Swift is installed.
"""

import sys

from swift.common import utils
from swift.common.wsgi import run_wsgi


def main() -> int:
    swift_conf, name, conf = sys.argv[1:]
    utils.SWIFT_CONF_FILE = swift_conf
    # The server's own options are read from the configuration file; only this one comes from the command line.
    return run_wsgi(conf, f"{name}-server", verbose=True)


if __name__ == "__main__":
    sys.exit(main())
