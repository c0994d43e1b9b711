"""vLLM's plugin: what vLLM finds without a module path.

python tests/engines/test_plugin.py     in an environment with vLLM and the wheel
"""

import os
import sys
import unittest
from unittest import mock

from kvgate import plugin
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_plugins_by_group

NAME = "KvGateConnector"


class PluginTest(unittest.TestCase):
    def setUp(self):
        # As in a process of vLLM's that has not loaded plugins yet.
        for registry in (KVConnectorFactory._registry, sys.modules):
            patch = mock.patch.dict(registry)
            patch.start()
            self.addCleanup(patch.stop)
        KVConnectorFactory._registry.pop(NAME, None)
        for module in [name for name in sys.modules if name.startswith("kvgate.vllm")]:
            del sys.modules[module]

    def load(self, **environment):
        with mock.patch.dict(os.environ, environment):
            if not environment:
                os.environ.pop("VLLM_PLUGINS", None)
            for function in load_plugins_by_group("vllm.general_plugins").values():
                function()
        return NAME in KVConnectorFactory._registry

    def test_the_name_alone_is_enough(self):
        self.assertTrue(self.load())
        found = KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector=NAME, kv_role="kv_both"))
        self.assertEqual((found.__name__, found.__module__), (NAME, "kvgate.vllm.connector"))
        # MultiConnector has no more than the name for statistics.
        self.assertIs(KVConnectorFactory.get_connector_class_by_name(NAME), found)

    def test_nothing_is_imported_before_it_is_asked_for(self):
        self.assertTrue(self.load())
        self.assertEqual([name for name in sys.modules if name.startswith("kvgate.vllm")], [])

    def test_it_may_be_loaded_again(self):
        self.load()
        with self.assertNoLogs("kvgate.plugin"):
            self.assertTrue(self.load())

    def test_vllm_plugins_may_leave_it_out(self):
        self.assertFalse(self.load(VLLM_PLUGINS="another"))
        self.assertTrue(self.load(VLLM_PLUGINS="another,kvgate"))

    def test_with_the_module_path_it_need_not_be_loaded(self):
        transfer = KVTransferConfig(kv_connector=NAME, kv_connector_module_path="kvgate.vllm", kv_role="kv_both")
        found = KVConnectorFactory.get_connector_class(transfer)
        self.assertIs(KVConnectorFactory.get_connector_class_by_name(NAME), found)

    def test_another_vllm_is_not_ended(self):
        with (
            mock.patch.dict(sys.modules, {"vllm.distributed.kv_transfer.kv_connector.factory": None}),
            self.assertLogs("kvgate.plugin", "WARNING"),
        ):
            plugin.register()


if __name__ == "__main__":
    unittest.main(verbosity=2)
