"""LoRA adapters by what they are, not by what they are called."""

from concurrent.futures import ThreadPoolExecutor

from vllm.logger import init_logger

from kvgate import weights

logger = init_logger(__name__)


class Adapters:
    """Digests of adapters' folders, made in the background: the scheduler never waits."""

    def __init__(self):
        self.digests = {}
        """By folder and what its files are like now."""
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="kvgate-adapters")

    def of(self, request):
        """What goes into the request's hashes: empty without an adapter; None: ask again. Raises OSError for one that
        nothing is known of."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return b""
        key = (lora.lora_path, weights.stamp(lora.lora_path))
        digest = self.digests.get(key)
        if digest is None:
            self.digests[key] = self.pool.submit(weights.digest, lora.lora_path)
            return None
        if not digest.done():
            return None
        return digest.result().encode()
