"""LoRA adapters, known by a digest of their files instead of their names."""

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor

from kvgate import weights

THREADS = 4
"""A mount that hangs keeps one thread for each of its folders that is asked for."""


@dataclasses.dataclass
class Job:
    digest: Future
    began: float


class Adapters:
    """Digests of adapters' folders. They are made in the background: the scheduler never waits, and reads no file."""

    def __init__(self, deadline_ms, now=time.monotonic):
        self.deadline_ms, self.now = deadline_ms, now
        self.jobs: dict[str, Job] = {}
        """By folder, its latest job."""
        self.asked: dict[str, Job] = {}
        """By request without an answer yet, the job that it waits for."""
        self.known: dict[str, tuple] = {}
        """By folder, the stamp of its files when they were read, and their digest."""
        self.cached: dict[tuple, str | None] = {}
        """By name and path, as in vLLM's own cache, the adapter's digest; None: there were several."""
        self.loaded: dict[int, str | None] = {}
        """By vLLM's number for loaded weights, their digest; None: there were several."""
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kvgate-adapters")

    def of(self, request):
        """The adapter's bytes in the request's hashes: empty without an adapter; None: ask again.

        Raises OSError if nothing is known of the adapter.
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return b""
        job = self.asked.pop(request.request_id, None) or self.job(lora.lora_path)
        if job.digest.done():
            return self.as_served(lora, job.digest.result()).encode()
        if self.now() - job.began >= self.deadline_ms / 1000:
            raise TimeoutError(f"{lora.lora_path} was not read within adapter_deadline_ms {self.deadline_ms}")
        self.asked[request.request_id] = job
        return None

    def as_served(self, lora, digest):
        """The digest, if it is that of the weights that vLLM has loaded and has computed its own cache with.

        vLLM keeps both when a folder is rewritten. Then this raises OSError.
        """
        if lora.load_inplace:
            self.loaded.pop(lora.lora_int_id, None)
        name, number = (lora.lora_name, lora.lora_path), lora.lora_int_id
        if not self.cached.setdefault(name, digest) == digest == self.loaded.setdefault(number, digest):
            self.cached[name] = self.loaded[number] = None
            raise OSError(
                f"{lora.lora_name} was served with other weights than are in {lora.lora_path} now: "
                "load these under a new name, from a folder of their own"
            )
        return digest

    def reset(self):
        """vLLM's own cache was emptied."""
        self.cached.clear()

    def forget(self, request_id):
        self.asked.pop(request_id, None)

    def job(self, folder):
        """Starts a look at the files for this request, or joins one that has not ended."""
        job = self.jobs.get(folder)
        if job is None or job.digest.done():
            job = self.jobs[folder] = Job(self.pool.submit(self.digest, folder), self.now())
        return job

    def digest(self, folder):
        stamp = weights.stamp(folder, is_deep=False)
        if self.known.get(folder, (None,))[0] != stamp:
            self.known[folder] = (stamp, weights.digest(folder, is_deep=False))
        return self.known[folder][1]
