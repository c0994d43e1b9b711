#!/usr/bin/env python3
"""The chart helm/kvgate: rendered by the real helm for several files of values, and each result checked.

- Manifests and examples against the schemas of the three newest Kubernetes, strictly; monitors and rules against the
  Prometheus Operator's own CRDs.
- The rendered configuration by the real `kvgate config check`, and by a real daemon: as the rendered user, with a
  read-only root and no capabilities (bubblewrap), the rendered arguments, environment and paths, and a real S3 server.
- Values that are wrong or of old are refused, with the key's name.
- Metrics, alert rules and the dashboard by promtool; each alert has its heading in docs/ALERTS.md.

Needs: tests/servers/install.sh python helm; KVGATE_TEST_BIN names the program.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import unittest
import urllib.parse
import urllib.request
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/kvgate"
VALUES = Path(__file__).parent / "values"
CACHE = Path(os.environ.get("KVGATE_TEST_CACHE", Path.home() / ".cache/kvgate-tests"))
HELM = CACHE / "bin/helm"
CRDS = CACHE / "crds"
KVGATE = Path(os.environ.get("KVGATE_TEST_BIN", ROOT / "target/debug/kvgate")).resolve()
RCLONE = Path(sys.executable).parent / "rclone"
NEWEST = ["1.35", "1.36", "1.37"]
START_SECONDS_MAX = 60
KEY, SECRET = "kvgatechart", "kvgatechartsecret0123456789"
FILES = sorted(VALUES.glob("*.yaml"))


def helm(*arguments, fails=False):
    done = subprocess.run([HELM, *map(str, arguments)], capture_output=True, text=True)
    if fails != bool(done.returncode):
        raise AssertionError(f"helm {' '.join(map(str, arguments))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stderr if fails else done.stdout


def render(*arguments):
    """The manifests of a release named kvgate, by kind and name."""
    text = helm("template", "kvgate", CHART, "--namespace", "kv", "--kube-version", f"{NEWEST[-1]}.0", *arguments)
    return {(found["kind"], found["metadata"]["name"]): found for found in yaml.safe_load_all(text) if found}


def of_kind(manifests, kind):
    (found,) = [manifest for (its, _), manifest in manifests.items() if its == kind]
    return found


def pod_of(manifests):
    return of_kind(manifests, "DaemonSet")["spec"]["template"]["spec"]


def validate(manifest):
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        (path,) = CRDS.glob(f"*_{manifest['kind'].lower()}s.yaml")
        (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        jsonschema.validate(manifest, strict(schema))
        return
    for version in NEWEST:
        kubernetes_validate.validate(manifest, version, strict=True)


def strict(schema):
    """A CRD's schema that refuses what the API server would drop in silence."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if "(?i)" in str(schema.get("pattern")):
        # Go takes a flag anywhere, Python at the start.
        schema["pattern"] = "(?i)" + schema["pattern"].replace("(?i)", "")
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        kept = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        # Metadata is the API server's own.
        if not kept and set(schema["properties"]) != {"apiVersion", "kind", "metadata", "spec", "status"}:
            schema["additionalProperties"] = False
    return schema


class Rendered(unittest.TestCase):
    def test_lint_finds_nothing_with_any_values(self):
        for values in FILES:
            with self.subTest(values.stem):
                helm("lint", "--strict", CHART, "--values", values)
        helm("lint", "--strict", CHART)

    def test_manifests_are_those_of_the_three_newest_kubernetes(self):
        kinds = set()
        for values in [None, *FILES]:
            for (kind, name), manifest in render(*(("--values", values) if values else ())).items():
                with self.subTest(values=values and values.stem, kind=kind, name=name):
                    validate(manifest)
                kinds.add(kind)
        self.assertEqual(
            kinds,
            {"ConfigMap", "DaemonSet", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule"}
            | {"Service", "ServiceAccount", "ServiceMonitor"},
        )

    def test_a_misspelt_field_would_be_found(self):
        manifests = render("--values", VALUES / "full.yaml")
        for kind, change in (
            ("DaemonSet", lambda spec: spec.update(updateStratgy={})),
            ("ServiceMonitor", lambda spec: spec["endpoints"][0].update(intervall="1s")),
            ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].update(exprr="1")),
        ):
            manifest = of_kind(manifests, kind)
            change(manifest["spec"])
            with self.subTest(kind), self.assertRaises(Exception) as refused:
                validate(manifest)
            self.assertIn("ValidationError", type(refused.exception).__name__)

    def test_the_rendered_configuration_is_one_that_the_program_accepts(self):
        for values in [None, *FILES]:
            with self.subTest(values=values and values.stem):
                check_configuration(render(*(("--values", values) if values else ())))

    def test_all_keys_of_the_program_pass_through(self):
        shown = json.loads(
            subprocess.run([KVGATE, "config", "show", "--json"], check=True, stdout=subprocess.PIPE).stdout
        )
        wanted = {}
        for key in shown:
            section, name = key["path"].split(".")
            wanted.setdefault(section, {})[name] = (
                yaml.safe_load(key["default"]) if key["default"] in ("true", "false") else key["default"]
            )
            if re.match("a whole number", key["accepts"]) and key["default"]:
                wanted[section][name] = int(key["default"])
        for section, name in (
            ("arena", "path"),
            ("api", "socket"),
            ("api", "listen"),
            ("api", "hosts"),
            ("api", "token_file"),
        ):
            del wanted[section][name]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump({"config": wanted}, file)
            manifests = render("--values", file.name)
        check_configuration(manifests)
        there = yaml.safe_load(configuration(manifests))
        for section, names in wanted.items():
            for name, value in names.items():
                self.assertEqual(there[section][name], value, f"{section}.{name}")

    def test_large_numbers_stay_whole(self):
        text = configuration(render("--values", VALUES / "full.yaml"))
        self.assertIn("hashes_max: 10000000\n", text)

    def test_the_version_is_the_programs(self):
        version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual([chart["version"], str(chart["appVersion"])], [version, version])


class Refused(unittest.TestCase):
    def refused(self, *arguments):
        return helm("template", "kvgate", CHART, *arguments, fails=True)

    def test_unknown_keys_are_named(self):
        for setting, name in (
            ("imagee.tag=1", "imagee"),
            ("image.tagg=1", "tagg"),
            ("config.s3.part_sise=1MiB", "part_sise"),
            ("config.lookpu.strategy=exact", "lookpu"),
            ("monitor.enable=true", "enable"),
            ("podDisruptionBudget.maxUnavailable=1", "maxUnavailable"),
        ):
            with self.subTest(setting):
                self.assertIn(f"'{name}'", self.refused("--set", setting))

    def test_values_of_the_wrong_kind_are_named(self):
        for setting, name in (
            ("mode=deployment", "mode"),
            ("config.s3.path_style=yes", "path_style"),
            ("config.store.when_full=wait", "when_full"),
            ("podDisruptionBudget.minAvailable=50%", "minAvailable"),
            ("image.digest=latest", "digest"),
            ("config.arena.size=64Gi", "config.arena.size"),
            ("config.store.drain=soon", "config.store.drain"),
            ("config.api.listen=", "config.api.listen"),
        ):
            with self.subTest(setting):
                self.assertIn(name, self.refused("--set", setting))

    def test_contradictions_are_named(self):
        for settings, words in (
            ("credentials.existingSecret=a,credentials.accessKeyId=b,credentials.secretAccessKey=c", "existingSecret"),
            ("credentials.accessKeyId=b", "secretAccessKey"),
            ("credentials.environment=true", "credentials.existingSecret"),
            ("prepare.enabled=false", "tokenSecret"),
            ("hostNetwork=true,networkPolicy.enabled=true", "hostNetwork"),
            ("extraEnv[0].name=KVGATE__ARENA__SIZE,extraEnv[0].value=1GiB", "KVGATE__ARENA__SIZE"),
        ):
            with self.subTest(settings):
                self.assertIn(words, self.refused("--set", settings))

    def test_folders_that_the_node_needs_are_not_given_away(self):
        for settings, folder in (
            ("config.arena.path=/dev/shm/arena", "/dev/shm/kvgate"),
            ("config.arena.path=/arena", "/kvgate"),
            ("config.api.socket=/run/kvgate.sock", "/run/kvgate"),
            ("sharedFolder=/dev/shm/", "/dev/shm/kvgate"),
            ("hugePages=true,config.arena.path=/dev/hugepages/arena", "/dev/hugepages/kvgate"),
            ("config.disk.paths=/mnt/nvme0\\,/mnt", "/mnt/kvgate"),
        ):
            with self.subTest(settings):
                self.assertIn(f"such as {folder}\n", self.refused("--set", settings) + "\n")


class Pod(unittest.TestCase):
    def test_the_gateway_has_no_rights_that_it_does_not_need(self):
        pod = pod_of(render())
        (container,) = pod["containers"]
        self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
        self.assertTrue(pod["securityContext"]["runAsNonRoot"])
        self.assertFalse(pod["automountServiceAccountToken"])
        self.assertEqual(
            container["securityContext"],
            {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        )
        self.assertEqual(
            pod["initContainers"][0]["securityContext"]["capabilities"], {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
        )

    def test_memlock_is_given_where_it_is_used(self):
        (container,) = pod_of(render("--set", "config.arena.mlock=true"))["containers"]
        self.assertEqual(container["securityContext"]["capabilities"], {"drop": ["ALL"], "add": ["IPC_LOCK"]})

    def test_the_time_to_end_is_longer_than_the_drain(self):
        for drain, seconds in (("30s", 45), ("1m30s", 105), ("1h", 3615), ("1500ms", 17), ("10", 25)):
            pod = pod_of(render("--set", f"config.store.drain={drain}"))
            self.assertEqual(pod["terminationGracePeriodSeconds"], seconds, drain)
        self.assertEqual(pod_of(render())["terminationGracePeriodSeconds"], 45)

    def test_memory_has_room_for_the_arena(self):
        for settings, memory, huge in (
            ("config.arena.size=64GiB", "67584Mi", None),
            ("config.arena.size=100MiB,resources.memoryBesideArena=1GiB", "1124Mi", None),
            ("config.arena.size=33GiB,hugePages=true", "2048Mi", "33792Mi"),
            ("config.arena.size=3MiB,hugePages=true", "2048Mi", "4Mi"),
        ):
            (container,) = pod_of(render("--set", settings))["containers"]
            for part in ("requests", "limits"):
                there = container["resources"][part]
                self.assertEqual((there["memory"], there.get("hugepages-2Mi")), (memory, huge), settings)

    def test_the_configurations_paths_are_mounted(self):
        for values in [None, *FILES]:
            manifests = render(*(("--values", values) if values else ()))
            if not any(kind == "DaemonSet" for kind, _ in manifests):
                continue
            config, pod = yaml.safe_load(configuration(manifests)), pod_of(manifests)
            (container,) = pod["containers"]
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            volumes = {volume["name"] for volume in pod["volumes"]}
            self.assertLessEqual({mount["name"] for mount in container["volumeMounts"]}, volumes)
            paths = [
                config["api"]["socket"],
                config["arena"]["path"],
                config["api"].get("token_file"),
                config["s3"].get("ca_file"),
            ]
            paths += config.get("disk", {}).get("paths", "").split(",")
            for path in filter(None, paths):
                with self.subTest(values=values and values.stem, path=path):
                    self.assertTrue(any(Path(path).is_relative_to(mount) for mount in mounts))

    def test_a_new_configuration_is_a_new_rollout(self):
        def checksum(*arguments):
            return of_kind(render(*arguments), "DaemonSet")["spec"]["template"]["metadata"]["annotations"][
                "checksum/config"
            ]

        self.assertEqual(checksum(), checksum("--set", "rules.enabled=true"))
        self.assertNotEqual(checksum(), checksum("--set", "config.log.level=debug"))

    def test_keys_come_by_file_environment_or_role(self):
        def gateway(*arguments):
            return pod_of(render(*arguments))["containers"][0]

        self.assertNotIn("env", gateway("--values", VALUES / "irsa.yaml"))
        file = {"name": "AWS_SHARED_CREDENTIALS_FILE", "value": "/etc/kvgate/aws/credentials"}
        self.assertIn(file, gateway("--values", VALUES / "full.yaml")["env"])
        environment = gateway("--values", VALUES / "environment.yaml")
        self.assertEqual(environment["envFrom"], [{"secretRef": {"name": "kvgate-s3"}}])
        self.assertNotIn("env", environment)

    def test_one_value_makes_the_gateways_peers(self):
        manifests = render("--set", "peersSecret=fleet,networkPolicy.enabled=true,config.peers.listen=0.0.0.0:9999")
        peers = yaml.safe_load(configuration(manifests))["peers"]
        at = "/etc/kvgate/peers/token"
        self.assertEqual(peers, {"members": "kvgate.kv.svc:9999", "token_file": at, "listen": "0.0.0.0:9999"})
        self.assertIn(
            ("peers", 9999), [(one["name"], one["port"]) for one in of_kind(manifests, "Service")["spec"]["ports"]]
        )
        pod = pod_of(manifests)
        (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "peers"]
        self.assertEqual(f"{mount['mountPath']}/token", at)
        policy = of_kind(manifests, "NetworkPolicy")["spec"]
        (rule,) = [one for one in policy["ingress"] if {"port": "peers", "protocol": "TCP"} in one["ports"]]
        self.assertEqual([list(source) for source in rule["from"]], [["podSelector"]], "the gateways alone")
        self.assertNotIn("peers", configuration(render()))

    def test_shared_folders_of_the_node_stay_as_they_are(self):
        (prepare,) = pod_of(render("--set", "tokenSecret=t"))["initContainers"]
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o1777)
            done = subprocess.run([*prepare["command"], folder], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, done)
            self.assertIn(f"{folder} is a folder for all users", done.stderr)
            self.assertEqual(os.stat(folder).st_mode & 0o7777, 0o1777)

    def test_the_policy_of_the_network_lets_the_gateway_reach_its_s3(self):
        def ports(settings):
            policy = of_kind(render("--set", f"networkPolicy.enabled=true,{settings}"), "NetworkPolicy")
            return [port["port"] for port in policy["spec"]["egress"][2]["ports"]]

        usual = [80, 443, 7480, 8080, 9000]
        for endpoint, expected in (
            ("http://rgw.example:8000", [*usual, 8000]),
            ("https://rgw.example", usual),
            ("http://[fd00::1]:7481/", [*usual, 7481]),
            ("", usual),
        ):
            self.assertEqual(ports(f"config.s3.endpoint={endpoint}"), expected, endpoint)
        only = "networkPolicy.s3.ports={9999}"
        self.assertEqual(ports(f"{only},config.s3.endpoint=https://rgw.example"), [9999, 443])
        extra = "networkPolicy.extraEgress[0].to[0].ipBlock.cidr=169.254.169.254/32"
        policy = of_kind(render("--set", f"networkPolicy.enabled=true,{extra}"), "NetworkPolicy")
        validate(policy)
        self.assertEqual(policy["spec"]["egress"][3], {"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}]})


class Examples(unittest.TestCase):
    def test_deployments_are_valid_and_meet_the_chart(self):
        chart = render()
        shared, user = (
            pod_of(chart)["volumes"][1]["hostPath"]["path"],
            str(pod_of(chart)["securityContext"]["runAsUser"]),
        )
        for name in ("vllm", "sglang", "vllm-sidecar"):
            (manifest,) = yaml.safe_load_all((CHART / f"examples/{name}.yaml").read_text())
            with self.subTest(name):
                validate(manifest)
                pod = manifest["spec"]["template"]["spec"]
                environment = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
                self.assertEqual(
                    environment["KVGATE__API__SOCKET"], yaml.safe_load(configuration(chart))["api"]["socket"]
                )
                self.assertEqual(environment["KVGATE__API__SOCKET_OWNER"], user)
                if name != "vllm-sidecar":
                    self.assertIn(
                        {"path": shared, "type": "DirectoryOrCreate"},
                        [volume.get("hostPath") for volume in pod["volumes"]],
                    )

    def test_the_sidecar_is_the_charts_gateway(self):
        sidecar = render("--values", VALUES / "sidecar.yaml")
        self.assertNotIn("DaemonSet", [kind for kind, _ in sidecar])
        (manifest,) = yaml.safe_load_all((CHART / "examples/vllm-sidecar.yaml").read_text())
        template = manifest["spec"]["template"]
        _, example = template["spec"]["initContainers"]
        (gateway,) = pod_of(render("--set", "credentials.existingSecret=kvgate-s3"))["containers"]
        for key in ("image", "args", "env", "resources"):
            self.assertEqual(example[key], gateway[key], key)
        self.assertLessEqual(gateway["securityContext"].items(), example["securityContext"].items())
        self.assertIn(("ConfigMap", "kvgate"), sidecar)
        self.assertIn(("ServiceAccount", template["spec"]["serviceAccountName"]), sidecar)
        monitor = of_kind(sidecar, "PodMonitor")["spec"]
        self.assertLessEqual(monitor["selector"]["matchLabels"].items(), template["metadata"]["labels"].items())
        self.assertEqual(monitor["podMetricsEndpoints"][0]["port"], example["ports"][0]["name"])
        self.assertTrue(template["spec"]["shareProcessNamespace"])

    def test_flags_for_engines_are_json(self):
        for path in sorted((CHART / "examples").glob("*.yaml")):
            found = re.findall(r"""\{\s*"(?:kv_connector|backend_name)".*?\}""", path.read_text(), re.DOTALL)
            self.assertTrue(found, path)
            for text in found:
                json.loads(text)


class Watching(unittest.TestCase):
    rules = CHART / "rules/alerts.yaml"

    def alerts(self):
        groups = yaml.safe_load(self.rules.read_text())["groups"]
        return {rule["alert"]: rule for group in groups for rule in group["rules"]}

    def promtool(self, action, *files):
        with tempfile.TemporaryDirectory() as folder:
            for file in files:
                shutil.copy(file, folder)
            done = subprocess.run(["promtool", *action, files[-1].name], cwd=folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_each_alert_fires_on_its_case_and_none_on_a_node_that_is_well(self):
        self.promtool(["check", "rules", "--lint-fatal"], self.rules)
        cases = Path(__file__).parent / "alerts_test.yaml"
        self.promtool(["test", "rules"], self.rules, cases)
        tests = yaml.safe_load(cases.read_text())["tests"]
        well, *fired = [[rule["alertname"] for rule in test["alert_rule_test"]] for test in tests]
        self.assertEqual(well, list(self.alerts()))
        self.assertEqual([name for (name,) in fired], list(self.alerts()))

    def test_each_alert_says_what_to_do(self):
        page = (ROOT / "docs/ALERTS.md").read_text()
        headings = re.findall(r"^## (Kvgate\w+)$", page, re.MULTILINE)
        self.assertEqual(headings, list(self.alerts()))
        for name, rule in self.alerts().items():
            self.assertTrue(rule["annotations"]["runbook_url"].endswith(f"/docs/ALERTS.md#{name.lower()}"), name)
            self.assertIn(rule["labels"]["severity"], ("info", "warning", "critical"), name)

    def test_rules_and_dashboard_name_metrics_that_there_are(self):
        known = set(re.findall(r"`((?:vllm:)?kvgate_[a-z0-9_]+)`", (ROOT / "docs/METRICS.md").read_text()))
        for path in (self.rules, CHART / "dashboards/kvgate.json"):
            named = set(re.findall(r"(?:vllm:)?\bkvgate_[a-z0-9_]+", path.read_text()))
            self.assertEqual({name.removesuffix("_bucket") for name in named} - known, set(), path)

    def test_the_dashboards_queries_are_promql(self):
        board = json.loads((CHART / "dashboards/kvgate.json").read_text())
        queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
        self.assertGreater(len(queries), 30)
        replaced = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in queries]
        rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(replaced)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "queries.yaml"
            file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
            self.promtool(["check", "rules"], file)

    def test_dashboard_and_rules_of_the_release_are_the_files(self):
        manifests = render("--values", VALUES / "full.yaml")
        self.assertEqual(of_kind(manifests, "PrometheusRule")["spec"], yaml.safe_load(self.rules.read_text()))
        board = manifests["ConfigMap", "kvgate-dashboard"]["data"]["kvgate.json"]
        self.assertEqual(json.loads(board), json.loads((CHART / "dashboards/kvgate.json").read_text()))


class Scraped(unittest.TestCase):
    """By a real Prometheus, as it comes and with native histograms."""

    def free_port(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return free.getsockname()[1]

    def asked(self, port, query):
        """The value of each series."""
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        end = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                found = json.load(urllib.request.urlopen(url, timeout=5))["data"]["result"]
                if found:
                    return [float(one["value"][1]) for one in found]
            time.sleep(0.2)
        raise AssertionError(f"Prometheus has nothing for {query}")

    def test_its_histograms_are_classic_ones_and_native_ones(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="kvgate-scraped-")))
        port, unix = self.free_port(), folder / "kvgate.sock"
        command = [KVGATE, "serve", "--embedded", folder / "s3", "--socket", unix, "--listen", f"127.0.0.1:{port}"]
        command += ["--arena-path", f"/dev/shm/{folder.name}.arena"]
        settings = {"KVGATE__ARENA__SIZE": "256MiB", "KVGATE__LOAD__RESERVE": "64MiB", "KVGATE__LOAD__WINDOW": "64MiB"}
        settings["KVGATE__STORE__WRITE_BEHIND"] = "64MiB"
        gateway = subprocess.Popen(command, env={**os.environ, **settings}, stdout=subprocess.DEVNULL)
        self.addCleanup(gateway.wait, 30)
        self.addCleanup(gateway.terminate)
        end = time.monotonic() + START_SECONDS_MAX
        while subprocess.run([KVGATE, "health", "--ready", "--socket", unix], capture_output=True).returncode:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)
        for number in range(5):
            lookup = [KVGATE, "lookup", "--socket", unix, "--model", "llama-3-8b", "--revision", "1", "--json"]
            tokens = " ".join(str(number) for _ in range(512))
            subprocess.run(lookup, input=tokens, text=True, check=True, stdout=subprocess.DEVNULL)
        config = {"scrape_configs": [{"job_name": "kvgate", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]}
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        for flags, counted, query in (
            ([], "kvgate_lookup_seconds_count", "histogram_quantile(0.5, kvgate_lookup_seconds_bucket)"),
            (
                ["--enable-feature=native-histograms"],
                "histogram_count(kvgate_lookup_seconds)",
                "histogram_quantile(0.5, kvgate_lookup_seconds)",
            ),
        ):
            own = self.free_port()
            flags += [f"--storage.tsdb.path={folder}/data-{own}", f"--web.listen-address=127.0.0.1:{own}"]
            flags += [f"--config.file={folder}/prometheus.yaml", "--log.level=warn"]
            prometheus = subprocess.Popen(["prometheus", *flags])
            try:
                self.assertEqual(self.asked(own, counted), [5.0])
                (half,) = self.asked(own, query)
                self.assertTrue(0 < half < 5, half)
                (mean,) = self.asked(own, "kvgate_node_ready + kvgate_memory_chunks")
                self.assertEqual(mean, 1.0)
            finally:
                prometheus.terminate()
                prometheus.wait(30)


def configuration(manifests):
    (text,) = [
        manifest["data"]["kvgate.yaml"] for manifest in manifests.values() if "kvgate.yaml" in manifest.get("data", {})
    ]
    return text


def check_configuration(manifests):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE__")}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(configuration(manifests))
        file.flush()
        command = [KVGATE, "config", "check", "--config", file.name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(true, process, log):
    end = time.monotonic() + START_SECONDS_MAX
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if true():
                return
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(log.read_text())
        time.sleep(0.05)


class Booted(unittest.TestCase):
    """The rendered pod's gateway, started by bubblewrap as Kubernetes would: with the files, mounts, user and rights that
    the manifest says, and nothing else."""

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        # The arena must be on tmpfs.
        self.shared = Path(self.enterContext(tempfile.TemporaryDirectory(dir="/dev/shm")))
        self.port, s3 = free_port(), free_port()
        (self.folder / "s3/kv-cache").mkdir(parents=True)
        (self.folder / "disk").mkdir()
        (self.folder / "none").touch()
        log = self.enterContext((self.folder / "s3.log").open("w"))
        command = [
            RCLONE,
            "serve",
            "s3",
            "--config",
            self.folder / "none",
            "--auth-key",
            f"{KEY},{SECRET}",
            "--addr",
            f"127.0.0.1:{s3}",
            self.folder / "s3",
        ]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        self.addCleanup(lambda: (server.kill(), server.wait()))
        values = {
            "sharedFolder": str(self.shared),
            "config": {
                "s3": {"endpoint": f"http://127.0.0.1:{s3}", "bucket": "kv-cache"},
                "arena": {"size": "64MiB"},
                "load": {"reserve": "16MiB"},
                "store": {"write_behind": "16MiB", "drain": "5s"},
                "disk": {"paths": "/mnt/nvme0/kvgate", "size": "64MiB"},
                "api": {"listen": f"127.0.0.1:{self.port}"},
            },
            "credentials": {"accessKeyId": KEY, "secretAccessKey": SECRET},
        }
        file = self.folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        self.manifests = render("--values", file)

    def start(self, *more):
        pod = pod_of(self.manifests)
        (prepare,), (container,) = pod["initContainers"], pod["containers"]
        self.run_container(prepare, pod, prepare["command"] + prepare["args"]).wait(30)
        process = self.run_container(container, pod, ["/kvgate", *container["args"]], *more)
        log = self.folder / "kvgate.log"
        until(lambda: self.get("/readyz") == 200, process, log)
        return process, log

    def run_container(self, container, pod, command, *more):
        sources = {volume["name"]: self.source(volume) for volume in pod["volumes"]}
        sandbox = ["bwrap", "--die-with-parent", "--unshare-user", "--unshare-ipc", "--cap-drop", "ALL"]
        # A user namespace has one user, so both containers are the gateway's, who may give its own folders to itself.
        user = pod["securityContext"]
        sandbox += ["--uid", str(user["runAsUser"]), "--gid", str(user["runAsGroup"])]
        for path in ("/usr", "/lib", "/lib64", "/bin"):
            sandbox += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
        sandbox += ["--ro-bind", KVGATE, "/kvgate", "--proc", "/proc", "--dev", "/dev"]
        sandbox += ["--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf"]
        for mount in container["volumeMounts"]:
            source = sources[mount["name"]] / mount.get("subPath", "")
            sandbox += ["--ro-bind" if mount.get("readOnly") else "--bind", source, mount["mountPath"]]
        if container["securityContext"]["readOnlyRootFilesystem"]:
            sandbox += ["--remount-ro", "/"]
        sandbox += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
        for variable in container.get("env", ()):
            sandbox += ["--setenv", variable["name"], variable["value"]]
        with (self.folder / f"{container['name']}.log").open("w") as log:
            process = subprocess.Popen([*map(str, sandbox), *more, *command], stdout=log, stderr=log)
        self.addCleanup(lambda: (process.kill(), process.wait()))
        return process

    def source(self, volume):
        """The folder that stands for a volume."""
        if "hostPath" in volume:
            return {str(self.shared): self.shared, "/mnt/nvme0/kvgate": self.folder / "disk"}[
                volume["hostPath"]["path"]
            ]
        contents = {"config": {"kvgate.yaml": configuration(self.manifests)}, "token": {}}
        contents["credentials"] = of_kind(self.manifests, "Secret")["stringData"]
        folder = self.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents[volume["name"]].items():
            (folder / name).write_text(text)
        return folder

    def get(self, path, host=None):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            connection.request("GET", path, headers={"Host": host} if host else {})
            answer = connection.getresponse()
            self.body = answer.read()
            return answer.status

    def attach(self, *namespace):
        """An engine's process, in namespaces of its own: it attaches, prints its session and waits."""
        program = """
import json, socket, sys
body = json.dumps({"instance": "engine", "rank": 0, "world_size": 1}).encode()
engine = socket.socket(socket.AF_UNIX)
engine.connect(sys.argv[1])
engine.sendall(b"POST /v1/attach HTTP/1.1\\r\\nHost: kvgate\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
print(engine.recv(65536).decode(), flush=True)
sys.stdin.read()
"""
        command = [*namespace, sys.executable, "-c", program, self.shared / "kvgate.sock"]
        engine = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(lambda: (engine.kill(), engine.wait(), engine.stdin.close(), engine.stdout.close()))
        self.assertIn("200 OK", engine.stdout.readline())
        until(
            lambda: self.get("/v1/status") == 200 and json.loads(self.body)["sessions"],
            engine,
            self.folder / "kvgate.log",
        )
        (session,) = json.loads(self.body)["sessions"]
        return session

    def test_it_serves_with_a_read_only_root_and_no_rights_and_drains(self):
        process, log = self.start()
        self.assertEqual((self.folder / "prepare.log").read_text(), "")
        self.assertEqual(self.get("/healthz"), 200)
        for host in ("kvgate", "kvgate.kv", "kvgate.kv.svc", "kvgate.kv.svc.cluster.local"):
            self.assertEqual(self.get("/metrics", f"{host}:{self.port}"), 200, host)
        self.assertEqual(self.get("/metrics", f"elsewhere:{self.port}"), 421)
        for name in ("kvgate.sock", "arena"):
            self.assertEqual((self.shared / name).stat().st_mode & 0o777, 0o660, name)
        # bubblewrap hands the signal on to nobody: the gateway is its only child.
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(child, signal.SIGTERM)
        self.assertEqual(process.wait(30), 0, log.read_text())
        self.assertIn("everything committed is stored", log.read_text())
        self.assertFalse((self.shared / "arena").exists())

    def test_prometheus_takes_its_metrics_without_a_complaint(self):
        process, log = self.start()
        until(
            lambda: self.get("/metrics") == 200 and b"kvgate_endpoint_up{" in self.body,
            process,
            log,
        )
        self.assertIn(b"kvgate_disk_up{", self.body)
        done = subprocess.run(["promtool", "check", "metrics"], input=self.body, capture_output=True)
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, b""))

    def test_an_engine_in_another_pods_pid_namespace_is_watched_from_the_nodes(self):
        _, log = self.start()
        session = self.attach("bwrap", "--dev-bind", "/", "/", "--unshare-user", "--unshare-pid", "--die-with-parent")
        self.assertIsNotNone(session["pid"])
        self.assertNotIn("can't be watched", log.read_text())

    def test_without_the_nodes_pid_namespace_it_says_so(self):
        _, log = self.start("--unshare-pid")
        session = self.attach()
        self.assertIsNone(session.get("pid"))
        self.assertIn("hostPID", log.read_text())


if __name__ == "__main__":
    unittest.main()
