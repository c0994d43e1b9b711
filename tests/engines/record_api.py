"""Adds a version of vLLM to connector_api.json: python record_api.py VERSION BASE_PY

BASE_PY: `vllm/distributed/kv_transfer/kv_connector/v1/base.py` out of that version's wheel."""

import json
import sys
from pathlib import Path

from test_connector import API, methods_of

version, path = sys.argv[1:]
known = json.loads(API.read_text()) if API.exists() else {}
known[version] = methods_of(Path(path).read_text())
API.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
