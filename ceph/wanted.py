"""What kvgate needs of a Ceph cluster, one item after the other. `apply.py` makes it, `check.py` looks for it.

Each item tells its problem, or None, and how to mend it. A mend goes through `Cluster.change`, which either does it or
prints it: so a dry run, the advice of `check.py` and what `apply.py` does can't differ.

An item looks only at what it is about: quotas, rules and statements of others stay as they are. Nothing is removed.
"""

import argparse
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

# Of the placement groups that an OSD should have, each replica counted, and the share of each pool.
PGS_PER_OSD = 100
SHARES = {"buckets.data": 0.85, "buckets.index": 0.1, "buckets.non-ec": 0.05}
PGS_MIN = 8
# RGW's advice for the index of a bucket, and what new buckets have since Pacific.
OBJECTS_PER_SHARD = 100_000
SHARDS_MIN = 11
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
# The rule's name before it was that of `kvgate lifecycle`.
OLD_RULE = "kvgate-chunks-expire"


class ClusterError(Exception):
    """Something can't be looked at or changed: a sentence that says what to do."""


def size(text):
    """Bytes of "10TiB"."""
    match = re.fullmatch(r"(\d+)([KMGTP]iB)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 10TiB or as a number of bytes")
    return int(match[1]) * UNITS[match[2] or ""]


def prefix(text):
    if not re.fullmatch(r"[A-Za-z0-9._/-]+", text) or text.startswith("/") or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is no prefix; write it as [s3] prefix of kvgate, such as kvgate")
    return text


def options(description, *more):
    """The arguments of both programs; `more` are those of one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", metavar="URL", required=True, help="S3, such as http://s3.example.com")
    parser.add_argument("--bucket", default="kvgate", help="[s3] bucket of kvgate [kvgate]")
    parser.add_argument("--prefix", type=prefix, default="kvgate", help="[s3] prefix of kvgate [kvgate]")
    parser.add_argument("--owner", metavar="USER", default="kvgate-owner", help="owns the bucket [kvgate-owner]")
    parser.add_argument("--engines", metavar="USER", default="kvgate", help="reads, writes and lists [kvgate]")
    parser.add_argument("--reader", metavar="USER", default="kvgate-reader", help="reads and lists [kvgate-reader]")
    parser.add_argument("--max-size", metavar="SIZE", type=size, required=True, help="the bucket's quota, as 10TiB")
    parser.add_argument("--max-objects", metavar="NUMBER", type=int, required=True, help="the bucket's quota")
    parser.add_argument("--days", type=int, default=30, help="age at which chunks are removed [30]")
    parser.add_argument("--shards", type=int, help="of the bucket's index [one for 100,000 objects, at least 11]")
    parser.add_argument("--zone", default="default", help="the pools' names begin with it [default]")
    parser.add_argument("--size", type=int, default=3, help="replicas of each object [3]")
    parser.add_argument("--min-size", type=int, default=2, help="replicas without which a pool stops [2]")
    parser.add_argument(
        "--osds", type=int, help="OSDs to share the placement groups [all that are in]; set it before all are there"
    )
    parser.add_argument("--spec", action="append", default=[], metavar="FILE", help="of cephadm; may be repeated")
    parser.add_argument("--shell", default="", metavar="COMMAND", help='before each command, as "cephadm shell --"')
    for name, keywords in more:
        parser.add_argument(name, **keywords)
    chosen = parser.parse_args()
    if chosen.size < 1 or not 1 <= chosen.min_size <= chosen.size:
        parser.error(f"--min-size is from 1 to --size, {chosen.size}")
    for name in ("max_size", "max_objects", "days"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    if len({chosen.owner, chosen.engines, chosen.reader}) < 3:
        parser.error("--owner, --engines and --reader are three users")
    return chosen


class Cluster:
    """`ceph`, `radosgw-admin` and S3, as the bucket's owner."""

    def __init__(self, chosen, really=False):
        """`really`: changes are made; otherwise they are printed."""
        self.chosen, self.really = chosen, really
        # What was asked since the last change.
        self.answers = {}
        self.shell = shlex.split(chosen.shell)
        for program in [self.shell[0]] if self.shell else ["ceph", "radosgw-admin"]:
            if shutil.which(program) is None:
                raise ClusterError(f'{program} is not here: install ceph-common, or use --shell "cephadm shell --"')

    def run(self, *command):
        """Its standard output. The error has what it said."""
        command = [*self.shell, *map(str, command)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{shlex.join(command)}: no answer in 300 s; is the cluster up (ceph -s)?") from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
            # radosgw-admin may say more after its error.
            error = next(
                (line for line in reversed(said) if re.search("error|fail|could not", line, re.IGNORECASE)), said[-1]
            )
            raise ClusterError(f"{shlex.join(command)}: {error}")
        return done.stdout

    def ask(self, *command):
        if command not in self.answers:
            self.answers[command] = json.loads(self.run(*command, "--format", "json"))
        return self.answers[command]

    def change(self, *command):
        if self.really:
            self.answers.clear()
            self.run(*command)
        print(f"    {'done' if self.really else 'do'}: {shlex.join(map(str, command))}")

    def change_s3(self, words, call):
        if self.really:
            self.answers.clear()
            try:
                call()
            except Exception as error:
                raise ClusterError(f"{words}: {error}") from error
        print(f"    {'done' if self.really else 'do'}: {words}")

    def user(self, uid):
        """As radosgw-admin tells of it; None: there is none."""
        try:
            return self.ask("radosgw-admin", "user", "info", f"--uid={uid}")
        except ClusterError as failure:
            if "no user info saved" in str(failure):
                return None
            raise

    def bucket(self):
        """None: there is none."""
        try:
            return self.ask("radosgw-admin", "bucket", "stats", f"--bucket={self.chosen.bucket}")
        except ClusterError as failure:
            if re.search(r"No such file|could not get bucket info|failure: \(2002\)", str(failure)):
                return None
            raise

    def pools(self):
        return {pool["pool_name"]: pool for pool in self.ask("ceph", "osd", "pool", "ls", "detail")}

    @cached_property
    def osds(self):
        return self.chosen.osds or self.ask("ceph", "osd", "stat")["num_in_osds"]

    def s3(self):
        """None: the owner has no keys yet."""
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise ClusterError("boto3 is not here: apt-get install python3-boto3, or pip install boto3") from error
        owner = self.user(self.chosen.owner)
        if owner is None or not owner["keys"]:
            return None
        keys = owner["keys"][0]
        return boto3.client(
            "s3",
            endpoint_url=self.chosen.endpoint,
            aws_access_key_id=keys["access_key"],
            aws_secret_access_key=keys["secret_key"],
            region_name="default",
            config=Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 2}),
        )


class Health:
    name = "the cluster's health"

    def __init__(self, cluster):
        self.cluster = cluster

    def problem(self):
        health = self.cluster.ask("ceph", "health")
        if health["status"] != "HEALTH_ERR":
            return None
        said = [check["summary"]["message"] for check in health["checks"].values() if check["severity"] == "HEALTH_ERR"]
        return "HEALTH_ERR: " + "; ".join(said)

    def mend(self):
        raise ClusterError("`ceph health detail` says what to do; this program can't")


class Pool:
    """Made before RGW makes it with a few placement groups, which would be split under load later."""

    def __init__(self, cluster, part, share):
        self.cluster, chosen = cluster, cluster.chosen
        self.pool = f"{chosen.zone}.rgw.{part}"
        self.name = f"pool {self.pool}"
        self.share = share

    @property
    def pg_num(self):
        """A power of two, not more than the pool's share."""
        wanted = PGS_PER_OSD * self.cluster.osds * self.share / self.cluster.chosen.size
        return max(PGS_MIN, 1 << max(0, int(wanted).bit_length() - 1))

    def wrong(self):
        """Keys and values to set, and the words for each."""
        pool, chosen = self.cluster.pools()[self.pool], self.cluster.chosen
        if pool.get("pg_num_target", pool["pg_num"]) < self.pg_num:
            yield "pg_num", self.pg_num, f"{pool['pg_num']} placement groups, not {self.pg_num}"
        if pool["pg_autoscale_mode"] != "off":
            yield (
                "pg_autoscale_mode",
                "off",
                f"pg_autoscale_mode is {pool['pg_autoscale_mode']}: it would split under load",
            )
        # A pool with erasure codes has its own sizes.
        if pool["type"] == 1 and pool["size"] != chosen.size:
            yield "size", chosen.size, f"{pool['size']} replicas, not {chosen.size}"
        if pool["type"] == 1 and pool["min_size"] != chosen.min_size:
            yield "min_size", chosen.min_size, f"min_size is {pool['min_size']}, not {chosen.min_size}"

    def problem(self):
        pool = self.cluster.pools().get(self.pool)
        if pool is None:
            return "is not there"
        words = [words for _, _, words in self.wrong()]
        if "rgw" not in pool["application_metadata"]:
            words.append("is not marked as RGW's")
        return "; ".join(words) or None

    def mend(self):
        change, pools = self.cluster.change, self.cluster.pools()
        if self.pool not in pools:
            change("ceph", "osd", "pool", "create", self.pool, self.pg_num, self.pg_num, "replicated")
            if not self.cluster.really:
                return
            pools = self.cluster.pools()
        for key, value, _ in list(self.wrong()):
            # Ceph asks back where a disk that fails takes objects with it.
            sure = ["--yes-i-really-mean-it"] if (key, value) == ("size", 1) else []
            change("ceph", "osd", "pool", "set", self.pool, key, value, *sure)
        if "rgw" not in pools[self.pool]["application_metadata"]:
            change("ceph", "osd", "pool", "application", "enable", self.pool, "rgw")


class Service:
    """A specification that cephadm has, and all of whose daemons run."""

    def __init__(self, cluster, path, kind, service_id):
        self.cluster, self.path = cluster, path
        self.service = f"{kind}.{service_id}"
        self.name = f"service {self.service}"

    def problem(self):
        # Without a manager `ceph orch` would wait for one.
        if not self.cluster.ask("ceph", "mgr", "stat")["available"]:
            raise ClusterError(
                "no manager is active, so cephadm can't be asked: start one (ceph -s), or leave out --spec"
            )
        found = self.cluster.ask("ceph", "orch", "ls", f"--service_name={self.service}")
        if not isinstance(found, list) or not found:
            return "cephadm does not know it"
        status = found[0]["status"]
        if status.get("running", 0) < status.get("size", 0):
            return f"{status.get('running', 0)} of {status['size']} daemons run; `ceph orch ps` tells which do not"
        return None

    def mend(self):
        self.cluster.change("ceph", "orch", "apply", "-i", self.path)


class User:
    def __init__(self, cluster, uid, role, max_buckets=None):
        self.cluster, self.uid, self.role, self.max_buckets = cluster, uid, role, max_buckets
        self.name = f"user {uid}"

    def problem(self):
        user = self.cluster.user(self.uid)
        if user is None:
            return f"is not there ({self.role})"
        if user["suspended"]:
            return "is suspended"
        if not user["keys"]:
            return "has no keys"
        if self.max_buckets is not None and user["max_buckets"] != self.max_buckets:
            return "may make buckets of its own"
        if self.max_buckets is not None and user["caps"]:
            return f"may administrate: {', '.join(cap['type'] for cap in user['caps'])}"
        return None

    def mend(self):
        user, admin = self.cluster.user(self.uid), ["radosgw-admin", "user"]
        uid = f"--uid={self.uid}"
        buckets = [] if self.max_buckets is None else [f"--max-buckets={self.max_buckets}"]
        if user is None:
            self.cluster.change(*admin, "create", uid, f"--display-name={self.role}", *buckets)
            return
        if user["suspended"]:
            self.cluster.change(*admin, "enable", uid)
        if not user["keys"]:
            self.cluster.change(
                "radosgw-admin", "key", "create", uid, "--key-type=s3", "--gen-access-key", "--gen-secret"
            )
        if buckets and user["max_buckets"] != self.max_buckets:
            self.cluster.change(*admin, "modify", uid, *buckets)
        if buckets and user["caps"]:
            caps = ";".join(f"{cap['type']}={cap['perm']}" for cap in user["caps"])
            self.cluster.change("radosgw-admin", "caps", "rm", uid, f"--caps={caps}")


class Quota:
    """Of each bucket of the owner, which has one."""

    name = "quota"

    def __init__(self, cluster):
        self.cluster = cluster

    def problem(self):
        user, chosen = self.cluster.user(self.cluster.chosen.owner), self.cluster.chosen
        if user is None:
            return f"user {chosen.owner} comes first"
        quota = user["bucket_quota"]
        if not quota["enabled"]:
            return "is off: the bucket may fill the cluster"
        if (quota["max_size"], quota["max_objects"]) != (chosen.max_size, chosen.max_objects):
            return f"{quota['max_size']} bytes and {quota['max_objects']} objects, not {chosen.max_size} and {chosen.max_objects}"
        return None

    def mend(self):
        chosen = self.cluster.chosen
        scope = ["--quota-scope=bucket", f"--uid={chosen.owner}"]
        limits = [f"--max-size={chosen.max_size}", f"--max-objects={chosen.max_objects}"]
        self.cluster.change("radosgw-admin", "quota", "set", *scope, *limits)
        self.cluster.change("radosgw-admin", "quota", "enable", *scope)


class Gateways:
    """Every address of the endpoint's name, since each is one that kvgate uses."""

    name = "gateways"

    def __init__(self, cluster):
        self.cluster = cluster

    def problem(self):
        url = urlsplit(self.cluster.chosen.endpoint)
        port = url.port or {"http": 80, "https": 443}.get(url.scheme)
        if url.hostname is None or port is None:
            return f"{self.cluster.chosen.endpoint} is no URL; write it as http://s3.example.com"
        try:
            found = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return f"{url.hostname} has no address ({error})"
        silent = []
        for address in sorted({where[0] for *_, where in found}):
            try:
                with socket.create_connection((address, port), timeout=5) as connection:
                    if url.scheme == "http":
                        self.answers(connection, url.hostname)
            except OSError as error:
                silent.append(f"{address}:{port} ({error})")
        return f"no answer of {', '.join(silent)}" if silent else None

    def answers(self, connection, host):
        connection.settimeout(5)
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        status = connection.recv(64).split(b" ")
        if len(status) < 2 or not status[1].isdigit() or int(status[1]) >= 500:
            raise OSError(f"it answers {status[1].decode('latin-1') if len(status) > 1 else 'nothing'}")

    def mend(self):
        raise ClusterError("start these gateways (ceph orch ps --daemon-type rgw), or take them out of the name")


class Bucket:
    name = "bucket"

    def __init__(self, cluster):
        self.cluster = cluster
        self.name = f"bucket {cluster.chosen.bucket}"

    def problem(self):
        bucket, owner = self.cluster.bucket(), self.cluster.chosen.owner
        if bucket is None:
            return "is not there"
        return None if bucket["owner"] == owner else f"belongs to {bucket['owner']}, not to {owner}"

    def mend(self):
        chosen = self.cluster.chosen
        if self.cluster.bucket() is not None:
            raise ClusterError(
                "another user owns it, so nothing was changed. Give it over by `radosgw-admin bucket link"
                f" --bucket={chosen.bucket} --uid={chosen.owner}`, or name another --bucket or --owner"
            )
        self.cluster.change_s3(
            f"create bucket {chosen.bucket} as {chosen.owner}",
            lambda: self.cluster.s3().create_bucket(Bucket=chosen.bucket),
        )


class Shards:
    name = "shards of the bucket's index"

    def __init__(self, cluster):
        self.cluster, chosen = cluster, cluster.chosen
        self.wanted = chosen.shards or max(SHARDS_MIN, -(-chosen.max_objects // OBJECTS_PER_SHARD))

    def problem(self):
        bucket = self.cluster.bucket()
        if bucket is None:
            return "the bucket comes first"
        if bucket["num_shards"] < self.wanted:
            return f"{bucket['num_shards']}, not {self.wanted}"
        return None

    def mend(self):
        bucket = f"--bucket={self.cluster.chosen.bucket}"
        self.cluster.change("radosgw-admin", "bucket", "reshard", bucket, f"--num-shards={self.wanted}")


class OnBucket:
    """Something that the bucket's owner sets over S3. A subclass has `absent` (S3's code), `found`, `wanted`, `put`."""

    def __init__(self, cluster):
        self.cluster = cluster

    def look(self):
        """What S3 has; None: nothing. A str: why it can't be asked."""
        from botocore.exceptions import BotoCoreError, ClientError

        chosen = self.cluster.chosen
        try:
            bucket = self.cluster.bucket()
            if bucket is None or bucket["owner"] != chosen.owner:
                return "the bucket comes first"
            s3 = self.cluster.s3()
            return f"user {chosen.owner} comes first" if s3 is None else self.found(s3)
        except ClientError as error:
            if error.response["Error"]["Code"] == self.absent:
                return None
            raise ClusterError(f"{self.name}: {error}") from error
        except BotoCoreError as error:
            raise ClusterError(f"{self.name}: {error}; is a gateway up at {chosen.endpoint}?") from error

    def problem(self):
        found = self.look()
        if isinstance(found, str):
            return found
        missing = [words for words, there in self.parts(found) if not there]
        return "; ".join(missing) or None

    def mend(self):
        found = self.look()
        self.put(None if isinstance(found, str) else found)


class Policy(OnBucket):
    """Statements with these names; others stay."""

    name, absent = "policy", "NoSuchBucketPolicy"

    def wanted(self):
        chosen = self.cluster.chosen
        bucket, objects = f"arn:aws:s3:::{chosen.bucket}", f"arn:aws:s3:::{chosen.bucket}/{chosen.prefix}/*"
        users = {
            "Engines": (chosen.engines, ["s3:GetObject", "s3:PutObject"]),
            "Readers": (chosen.reader, ["s3:GetObject"]),
        }
        # kvgate tries at its start what the server can do, and kvgate doctor more, on objects that they remove again.
        yield {
            "Sid": "KvGateEnginesProbe",
            "Effect": "Allow",
            "Principal": {"AWS": [f"arn:aws:iam:::user/{chosen.engines}"]},
            "Action": ["s3:DeleteObject"],
            "Resource": [f"{objects[:-1]}.kvgate/{own}-*" for own in ("probe", "doctor")],
        }
        for role, (uid, actions) in users.items():
            principal = {"AWS": [f"arn:aws:iam:::user/{uid}"]}
            yield {
                "Sid": f"KvGate{role}Objects",
                "Effect": "Allow",
                "Principal": principal,
                "Action": actions,
                "Resource": [objects],
            }
            listing = {
                "Effect": "Allow",
                "Principal": principal,
                "Action": ["s3:ListBucket"],
                "Resource": [bucket],
            }
            under_prefix = {"StringLike": {"s3:prefix": [f"{chosen.prefix}/*"]}}
            yield {"Sid": f"KvGate{role}List", **listing, "Condition": under_prefix}
            # The same right decides whether HEAD of a missing object answers 404 or 403, and of the bucket 200 or 403.
            # kvgate needs both: a 403 is "unknown", not "absent". RGW gives each listing a max-keys, and no HEAD has one.
            yield {"Sid": f"KvGate{role}Head", **listing, "Condition": {"Null": {"s3:max-keys": "true"}}}

    def found(self, s3):
        return json.loads(s3.get_bucket_policy(Bucket=self.cluster.chosen.bucket)["Policy"])

    def parts(self, found):
        statements = (found or {}).get("Statement", [])
        for statement in self.wanted():
            yield f"no statement {statement['Sid']} as it should be", statement in statements

    def put(self, found):
        wanted, chosen = list(self.wanted()), self.cluster.chosen
        names = {statement["Sid"] for statement in wanted}
        others = [one for one in (found or {}).get("Statement", []) if one.get("Sid") not in names]
        policy = json.dumps({"Version": "2012-10-17", "Statement": [*others, *wanted]})
        self.cluster.change_s3(
            f"put bucket policy {policy}",
            lambda: self.cluster.s3().put_bucket_policy(Bucket=chosen.bucket, Policy=policy),
        )


class Lifecycle(OnBucket):
    """The rule of `kvgate lifecycle` for this prefix; others stay."""

    name, absent = "lifecycle", "NoSuchLifecycleConfiguration"

    def __init__(self, cluster):
        super().__init__(cluster)
        self.prefix = f"{cluster.chosen.prefix}/"
        self.id = f"kvgate-age {self.prefix}"

    def wanted(self):
        return {
            "ID": self.id,
            "Status": "Enabled",
            "Filter": {"Prefix": self.prefix},
            "Expiration": {"Days": self.cluster.chosen.days},
        }

    def found(self, s3):
        return s3.get_bucket_lifecycle_configuration(Bucket=self.cluster.chosen.bucket)["Rules"]

    def parts(self, found):
        ours = [rule for rule in found or [] if self.is_ours(rule)]
        words = f"no rule {self.id} that removes what is older than {self.cluster.chosen.days} days, and no other of kvgate's"
        yield words, ours == [self.wanted()]

    def is_ours(self, rule):
        is_old = rule.get("ID") == OLD_RULE and rule.get("Filter", {}).get("Prefix") == self.prefix
        return rule.get("ID") == self.id or is_old

    def put(self, found):
        rules = [*(rule for rule in found or [] if not self.is_ours(rule)), self.wanted()]
        self.cluster.change_s3(
            f"put lifecycle {json.dumps(rules)}",
            lambda: self.cluster.s3().put_bucket_lifecycle_configuration(
                Bucket=self.cluster.chosen.bucket, LifecycleConfiguration={"Rules": rules}
            ),
        )


def services(cluster):
    """Those of the --spec files, without a YAML reader: cephadm reads them."""
    for path in cluster.chosen.spec:
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ClusterError(f"--spec {path}: {error.strerror}") from error
        for document in re.split(r"^---\s*$", text, flags=re.MULTILINE):
            fields = dict(re.findall(r"^(service_type|service_id):\s*(\S+)", document, re.MULTILINE))
            if len(fields) == 2:
                yield Service(cluster, path, fields["service_type"], fields["service_id"])


def items(cluster):
    """In the order of making: each needs only those before it."""
    chosen = cluster.chosen
    return [
        Health(cluster),
        *(Pool(cluster, part, share) for part, share in SHARES.items()),
        *services(cluster),
        User(cluster, chosen.owner, "owns kvgate's bucket"),
        # -1: none at all.
        User(cluster, chosen.engines, "reads, writes and lists chunks", max_buckets=-1),
        User(cluster, chosen.reader, "reads and lists chunks", max_buckets=-1),
        Quota(cluster),
        Gateways(cluster),
        Bucket(cluster),
        Shards(cluster),
        Policy(cluster),
        Lifecycle(cluster),
    ]


def end(main):
    """Runs it; a ClusterError becomes a line and status 2."""
    try:
        sys.exit(main())
    except ClusterError as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        sys.exit(2)
