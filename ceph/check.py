#!/usr/bin/env python3
"""Looks whether a Ceph cluster has what kvgate needs, changes nothing, and says what to do about the rest.

    ceph/check.py --endpoint http://s3.example.com --max-size 10TiB --max-objects 400000

Status: 0 all is there, 1 something is missing or differs, 2 something can't be looked at.
"""

import sys

from wanted import Cluster, ClusterError, end, items, options


def main():
    cluster = Cluster(options(__doc__))
    missing, failed = 0, 0
    for item in items(cluster):
        try:
            problem = item.problem()
        except ClusterError as failure:
            failed += 1
            print(f"?       {item.name}: {failure}")
            continue
        if problem is None:
            print(f"ok      {item.name}")
            continue
        missing += 1
        print(f"MISSING {item.name}: {problem}")
        try:
            item.mend()
        except ClusterError as failure:
            print(f"    do: {failure}")
    if failed:
        print(f"{failed} could not be looked at, {missing} missing", file=sys.stderr)
        return 2
    print(f"{missing} missing; ceph/apply.py --yes with the same arguments makes it" if missing else "all is there")
    return 1 if missing else 0


end(main)
