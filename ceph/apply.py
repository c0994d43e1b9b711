#!/usr/bin/env python3
"""Makes what kvgate needs on a Ceph cluster: pools, services, users, quota, bucket, policy, lifecycle. What is there stays.

    ceph/apply.py --endpoint http://s3.example.com --max-size 10TiB --max-objects 400000          says what it would do
    ceph/apply.py --endpoint http://s3.example.com --max-size 10TiB --max-objects 400000 --yes    does it

It may be run again at any time: a second run finds nothing to do. It removes nothing.
Status: 0 done, or nothing to do, or a dry run; 1 something is still missing; 2 a step failed, those after it were not done.
"""

from wanted import Cluster, ClusterError, end, items, options


def main():
    chosen = options(
        __doc__,
        ("--yes", {"action": "store_true", "help": "do it; without, it is a dry run"}),
        ("--dry-run", {"action": "store_true", "help": "the default; wins over --yes"}),
    )
    really = chosen.yes and not chosen.dry_run
    cluster = Cluster(chosen, really)
    changed, left = 0, []
    for item in items(cluster):
        problem = item.problem()
        if problem is None:
            print(f"ok      {item.name}")
            continue
        print(f"{'making ' if really else 'MISSING'} {item.name}: {problem}")
        try:
            item.mend()
        except ClusterError as failure:
            if really and item.name not in ("the cluster's health", "gateways"):
                raise
            print(f"    do: {failure}")
        changed += 1
        if really and (problem := item.problem()) is not None:
            left.append(f"{item.name}: {problem}")
    if not really:
        print(f"a dry run: {changed} to make; --yes does it" if changed else "nothing to do")
        return 0
    for line in left:
        print(f"STILL MISSING {line}")
    if not left:
        print(f"{changed} made" if changed else "nothing to do")
        print(
            f"kvgate: --endpoint {chosen.endpoint} --bucket {chosen.bucket} --prefix {chosen.prefix}, and the keys that"
        )
        print(f"    {' '.join([*cluster.shell, 'radosgw-admin'])} user info --uid={chosen.engines}   says")
    return 1 if left else 0


end(main)
