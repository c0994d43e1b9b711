#!/usr/bin/env python3
"""ceph/: what apply.py makes on a real Ceph lets kvgate do its work and nothing else, and check.py finds each thing that is
missing. cephadm's specifications go through Ceph's own reader of them.

The Ceph has no manager: what cephadm does with the specifications is not tested.
"""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from botocore.exceptions import ClientError
from lab import KVGATE, PORT, ROOT, Ceph, Process, until

ADDRESS = "127.0.0.21"
# Fields of the concentrator, which Debian's Ceph does not know.
CONCENTRATOR = (
    "rgw_exit_timeout_secs",
    "concentrator",
    "concentrator_frontend_port",
    "concentrator_monitor_port",
    "concentrator_monitor_user",
)
READ_SPEC = """
import json, sys, yaml
from ceph.deployment.service_spec import ServiceSpec
for spec in json.load(sys.stdin):
    read = ServiceSpec.from_json(spec)
    read.validate()
    print(read.service_name())
"""


class Cephs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # A day of the lifecycle has two seconds, and quotas are counted anew at each request.
        cls.ceph = Ceph(
            1,
            [ADDRESS, "127.0.0.22"],
            KVGATE_CEPH_LC_DAY="2",
            KVGATE_CEPH_RGW_EXTRA="rgw bucket quota ttl = 0\nrgw bucket quota soft threshold = 0",
        )
        cls.addClassCleanup(cls.ceph.end)

    def program(self, name, *arguments, status=0, address=ADDRESS):
        words = f"--endpoint http://{address}:{PORT} --engines engines --size 1 --min-size 1".split()
        for flag, value in (("--max-size", "256MiB"), ("--max-objects", "1000"), ("--days", "3000")):
            if flag not in arguments:
                words += [flag, value]
        done = self.ceph.run(sys.executable, "-B", ROOT / "ceph" / name, *words, *arguments, check=False)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def apply(self, *arguments, **more):
        return self.program("apply.py", "--yes", *arguments, **more)

    def admin(self, *command):
        return self.ceph.run("radosgw-admin", *command).stdout

    def keys(self, user):
        return json.loads(self.admin("user", "info", f"--uid={user}"))["keys"][0]

    def s3(self, user):
        return self.ceph.s3("127.0.0.22", self.keys(user))

    def kvgate(self, user, *command, check=True):
        keys = self.keys(user)
        where = ["--endpoint", f"http://{ADDRESS}:{PORT}", "--bucket", "kvgate", "--prefix", "kvgate"]
        return self.ceph.run(
            KVGATE,
            *command,
            *where,
            check=check,
            AWS_ACCESS_KEY_ID=keys["access_key"],
            AWS_SECRET_ACCESS_KEY=keys["secret_key"],
        )

    def refused(self, call, code="AccessDenied", **arguments):
        with self.assertRaises(ClientError) as raised:
            call(**arguments)
        self.assertIn(raised.exception.response["Error"]["Code"], (code, "403"))

    def test_a_bare_cluster_becomes_one_for_kvgate(self):
        before = self.ceph.run("ceph", "osd", "pool", "ls").stdout, self.admin("user", "list")
        planned = self.program("apply.py")
        self.assertIn("--yes does it", planned)
        self.assertIn("--yes does it", self.program("apply.py", "--yes", "--dry-run"))
        after = self.ceph.run("ceph", "osd", "pool", "ls").stdout, self.admin("user", "list")
        self.assertEqual(before, after, "a dry run")
        bare = self.program("check.py", status=1)
        things = (
            "pool default.rgw.buckets.data",
            "pool default.rgw.buckets.index",
            "pool default.rgw.buckets.non-ec",
            "user kvgate-owner",
            "user engines",
            "user kvgate-reader",
            "quota",
            "bucket kvgate",
            "shards of the bucket's index",
            "policy",
            "lifecycle",
        )
        for thing in things:
            self.assertIn(f"MISSING {thing}: ", bare)
        # The advice is what is done.
        advice = [line.split("do: ")[1] for line in bare.splitlines() if "    do: radosgw-admin user create" in line]
        made = self.apply()
        for line in advice:
            self.assertIn(f"done: {line}", made)
        self.assertIn("all is there", self.program("check.py"))
        self.assertIn("nothing to do", self.apply())
        pools = {pool["pool_name"]: pool for pool in json.loads(self.ceph.run(*POOLS).stdout)}
        self.assertEqual(pools["default.rgw.buckets.data"]["pg_num"], 64, "of 85 for one OSD the power of two below")

        with self.subTest("rights"):
            self.rights()
        with self.subTest("kvgate"):
            self.kvgate_works()
        with self.subTest("breakages"):
            self.each_thing_that_is_missing_is_found()
        with self.subTest("quota"):
            self.the_quota_refuses()
        with self.subTest("lifecycle"):
            self.old_chunks_go_and_others_stay()

    def rights(self):
        owner, engines, reader = map(self.s3, ("kvgate-owner", "engines", "kvgate-reader"))
        inside = {"Bucket": "kvgate", "Key": "kvgate/a"}
        outside = {"Bucket": "kvgate", "Key": "other/a"}
        owner.put_object(**outside, Body=b"x")
        engines.put_object(**inside, Body=b"x")
        for user in (engines, reader):
            user.get_object(**inside)
            user.head_object(**inside)
            user.head_bucket(Bucket="kvgate")
            self.assertEqual(user.list_objects_v2(Bucket="kvgate", Prefix="kvgate/")["KeyCount"], 1)
            with self.assertRaises(ClientError) as absent:
                user.head_object(Bucket="kvgate", Key="kvgate/absent")
            self.assertEqual(absent.exception.response["Error"]["Code"], "404", "absent, not refused")
            self.refused(user.get_object, **outside)
            self.refused(user.put_object, **outside, Body=b"x")
            self.refused(user.delete_object, **inside)
            for listing in (user.list_objects, user.list_objects_v2, user.list_object_versions):
                self.refused(listing, Bucket="kvgate")
                self.refused(listing, Bucket="kvgate", Prefix="other/")
            self.refused(user.create_bucket, Bucket="of-my-own")
            self.refused(user.delete_bucket_policy, Bucket="kvgate")
            self.refused(user.delete_bucket_lifecycle, Bucket="kvgate")
            self.refused(user.get_bucket_policy, Bucket="kvgate")
        self.refused(reader.put_object, **inside, Body=b"x")

    def kvgate_works(self):
        """With each role's keys; with the first shape of the policy its HEADs told nothing."""
        model = ["--model", "deepseek-v3", "--tokens", "1024", "--conversations", "1"]
        self.kvgate("engines", "demo", *model, "--keep")
        listed = json.loads(self.kvgate("kvgate-reader", "ls", "--json").stdout)["spaces"]
        self.assertEqual(len(listed), 1)
        self.kvgate("kvgate-reader", "verify")
        refused = self.kvgate("kvgate-reader", "demo", *model, check=False)
        self.assertNotEqual(refused.returncode, 0)
        skip = [word for part in ("engines", "memory", "gpu", "api") for word in ("--skip", part)]
        doctor = self.kvgate("engines", "doctor", *skip, "--transfer-size", "1MiB")
        self.assertIn("nothing is left", doctor.stdout)
        left = self.s3("kvgate-owner").list_objects_v2(Bucket="kvgate", Prefix="kvgate/.kvgate/")
        self.assertEqual(left["KeyCount"], 0, "what kvgate tries at its start is removed again")

    def each_thing_that_is_missing_is_found(self):
        owner = self.s3("kvgate-owner")
        other_statement = {
            "Sid": "Other",
            "Effect": "Allow",
            "Principal": {"AWS": ["arn:aws:iam:::user/kvgate"]},
            "Action": ["s3:GetObject"],
            "Resource": ["arn:aws:s3:::kvgate/other/*"],
        }
        other_rule = {
            "ID": "other",
            "Status": "Enabled",
            "Filter": {"Prefix": "other-old/"},
            "Expiration": {"Days": 1000},
        }
        # As apply.py wrote it before.
        old_rule = {
            "ID": "kvgate-chunks-expire",
            "Status": "Enabled",
            "Filter": {"Prefix": "kvgate/"},
            "Expiration": {"Days": 30},
        }
        for command in (
            "ceph osd pool application disable default.rgw.buckets.data rgw --yes-i-really-mean-it",
            "ceph osd pool set default.rgw.buckets.index pg_autoscale_mode on",
            "ceph osd pool delete default.rgw.buckets.non-ec default.rgw.buckets.non-ec --yes-i-really-really-mean-it",
            "radosgw-admin user suspend --uid=kvgate-reader",
            "radosgw-admin caps add --uid=engines --caps=users=*",
            "radosgw-admin user modify --uid=engines --max-buckets=5",
            "radosgw-admin quota disable --quota-scope=bucket --uid=kvgate-owner",
        ):
            self.ceph.run(*command.split())
        owner.put_bucket_policy(
            Bucket="kvgate", Policy=json.dumps({"Version": "2012-10-17", "Statement": [other_statement]})
        )
        rules = {"Rules": [other_rule, old_rule]}
        owner.put_bucket_lifecycle_configuration(Bucket="kvgate", LifecycleConfiguration=rules)
        more = ("--shards", "16", "--osds", "2")
        red = self.program("check.py", *more, status=1)
        for words in (
            "MISSING pool default.rgw.buckets.data: 64 placement groups, not 128; is not marked",
            "MISSING pool default.rgw.buckets.index: 8 placement groups, not 16; pg_autoscale_mode is on",
            "MISSING pool default.rgw.buckets.non-ec: is not there",
            "MISSING user kvgate-reader: is suspended",
            "MISSING user engines: may make buckets",
            "MISSING quota: is off",
            "MISSING shards of the bucket's index: 11, not 16",
            "MISSING policy: no statement KvGateEnginesProbe",
            "MISSING lifecycle: no rule",
        ):
            self.assertIn(words, red)
        self.apply(*more)
        self.program("check.py", *more)
        statements = json.loads(owner.get_bucket_policy(Bucket="kvgate")["Policy"])["Statement"]
        self.assertIn(other_statement, statements)
        rules = owner.get_bucket_lifecycle_configuration(Bucket="kvgate")["Rules"]
        self.assertEqual(sorted(rule["ID"] for rule in rules), ["kvgate-age kvgate/", "other"])

        key = self.keys("engines")["access_key"]
        self.admin("key", "rm", "--uid=engines", f"--access-key={key}")
        self.admin("quota", "set", "--quota-scope=bucket", "--uid=kvgate-owner", "--max-objects=5")
        self.admin("caps", "add", "--uid=kvgate-reader", "--caps=buckets=read")
        self.admin("bucket", "link", "--bucket=kvgate", "--uid=denied")
        red = self.program("check.py", *more, status=1)
        for words in (
            "MISSING user engines: has no keys",
            "MISSING user kvgate-reader: may administrate: buckets",
            "MISSING quota: 268435456 bytes and 5 objects, not 268435456 and 1000",
            "MISSING bucket kvgate: belongs to denied",
        ):
            self.assertIn(words, red)
        self.assertIn("Give it over by `radosgw-admin bucket link", self.apply(*more, status=2))
        self.admin("bucket", "link", "--bucket=kvgate", "--uid=kvgate-owner")
        self.apply(*more)
        self.program("check.py", *more)

        self.ceph.rgw("stop", "127.0.0.22")
        silent = self.program("check.py", *more, status=2, address="127.0.0.22")
        self.ceph.rgw("start", "127.0.0.22")
        self.assertIn("MISSING gateways: no answer of 127.0.0.22", silent)
        self.assertIn("is a gateway up at http://127.0.0.22", silent)

    def the_quota_refuses(self):
        engines = self.s3("engines")
        held = json.loads(self.admin("bucket", "stats", "--bucket=kvgate"))["usage"]["rgw.main"]["num_objects"]
        few = ("--shards", "16", "--osds", "2", "--max-objects", str(held + 2))
        self.apply(*few)

        def refused():
            try:
                engines.put_object(Bucket="kvgate", Key=f"kvgate/fill-{refused.count}", Body=b"x")
            except ClientError as error:
                return error.response["Error"]["Code"]
            refused.count += 1

        refused.count = 0
        self.assertEqual(until(refused), "QuotaExceeded")
        self.assertLessEqual(refused.count, 2)
        engines.get_object(Bucket="kvgate", Key="kvgate/a")
        told = self.kvgate("engines", "demo", *["--model", "deepseek-v3", "--tokens", "512"], check=False)
        self.assertIn("the quota is used up", told.stderr)
        with tempfile.TemporaryDirectory() as folder:
            self.a_node_starts_all_the_same(folder)

    def a_node_starts_all_the_same(self, folder):
        socket, keys = ["--socket", f"{folder}/kvgate.sock"], self.keys("engines")
        where = ["--endpoint", f"http://{ADDRESS}:{PORT}", "--bucket", "kvgate", "--prefix", "kvgate"]

        def ask(*command):
            return self.ceph.run(KVGATE, *command, *socket, check=False)

        node = Process(
            folder,
            "node",
            [KVGATE, "serve", *socket, *where],
            lambda: ask("health", "--ready").returncode == 0,
            AWS_ACCESS_KEY_ID=keys["access_key"],
            AWS_SECRET_ACCESS_KEY=keys["secret_key"],
            KVGATE__API__LISTEN="127.0.0.1:0",
            KVGATE__ARENA__PATH=f"/dev/shm/kvgate-{Path(folder).name}",
        )
        self.addCleanup(node.kill)
        self.assertIn("quota of the bucket or its owner is used up", ask("stat").stdout)
        node.process.terminate()
        self.assertEqual(node.process.wait(), 0)

    def old_chunks_go_and_others_stay(self):
        owner = self.s3("kvgate-owner")
        self.apply("--shards", "16", "--osds", "2", "--days", "1")
        until(lambda: not owner.list_objects_v2(Bucket="kvgate", Prefix="kvgate/")["KeyCount"])
        owner.get_object(Bucket="kvgate", Key="other/a")

    def test_what_can_not_be_looked_at_is_status_2(self):
        found = self.program("check.py", "--spec", ROOT / "ceph/specs/rgw.yaml", status=2)
        self.assertIn("?       service rgw.kvgate: no manager is active", found)
        self.assertIn("nowhere is not here", self.program("check.py", "--shell", "nowhere", status=2))
        self.assertIn("write it as 10TiB", self.program("check.py", "--max-size", "10TB", status=2))
        self.assertIn("--spec nowhere.yaml", self.program("check.py", "--spec", "nowhere.yaml", status=2))

    def test_specifications_are_what_ceph_reads(self):
        specs = {}
        for name in ("osd", "rgw", "rgw-concentrator"):
            text = (ROOT / f"ceph/specs/{name}.yaml").read_text()
            done = subprocess.run(
                ["/usr/bin/python3", "-c", "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)))"],
                input=text,
                capture_output=True,
                text=True,
                check=True,
            )
            specs[name] = json.loads(done.stdout)
        for field in CONCENTRATOR:
            del specs["rgw-concentrator"]["spec"][field]
        self.assertEqual(specs["rgw"], specs["rgw-concentrator"], "but for the concentrator they are the same")
        read = ["/usr/bin/python3", "-c", READ_SPEC]
        done = subprocess.run(read, input=json.dumps(list(specs.values())), capture_output=True, text=True)
        self.assertEqual(done.stdout.split(), ["osd.nvme", "rgw.kvgate", "rgw.kvgate"], done.stderr)
        specs["rgw"]["spec"]["rgw_frontend_prot"] = 1
        done = subprocess.run(read, input=json.dumps([specs["rgw"]]), capture_output=True, text=True)
        self.assertIn("rgw_frontend_prot", done.stderr)


POOLS = ("ceph", "osd", "pool", "ls", "detail", "--format", "json")

if __name__ == "__main__":
    unittest.main()
