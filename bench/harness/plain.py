"""Plain clients that read from several addresses at once: signed GETs of ranges, thrown away."""

import datetime
import hashlib
import hmac
import http.client
import threading
import time
from urllib.parse import quote

from .servers import CREDENTIALS
from .tools import FailedError
from .workload import BUCKET, MIB

REGION = "us-east-1"
EMPTY = hashlib.sha256(b"").hexdigest()


def mb_per_s(addresses: list[str], port: int, key: str, part_size: int, seconds: float, connections: int = 4) -> float:
    """All addresses together, each with so many connections that never wait for one another."""
    came = [0] * (len(addresses) * connections)
    errors: list[str] = []
    end = time.monotonic() + seconds

    def read(number: int) -> None:
        address = addresses[number % len(addresses)]
        connection = http.client.HTTPConnection(address, port, timeout=30)
        piece = memoryview(bytearray(MIB))
        path = f"/{BUCKET}/{quote(key)}"
        try:
            while time.monotonic() < end:
                headers = {**signed(f"{address}:{port}", path), "Range": f"bytes=0-{part_size - 1}"}
                connection.request("GET", path, headers=headers)
                answer = connection.getresponse()
                if answer.status != 206:
                    raise FailedError(f"{address} answers {answer.status}")
                while (len_ := answer.readinto(piece)) > 0:
                    # Bytes that come after the end are not counted.
                    came[number] += len_ if time.monotonic() < end else 0
        except (OSError, http.client.HTTPException, FailedError) as error:
            errors.append(str(error))
        finally:
            connection.close()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(came))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise FailedError(f"a plain client: {errors[0]}")
    return sum(came) / 1e6 / seconds


def signed(host: str, path: str) -> dict[str, str]:
    """The headers of a GET without a body, by AWS's signature 4."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": EMPTY, "x-amz-date": now}
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = hashlib.sha256(f"GET\n{path}\n\n{lines}\n{names}\n{EMPTY}".encode()).hexdigest()
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    signing = f"AWS4{CREDENTIALS['AWS_SECRET_ACCESS_KEY']}".encode()
    for word in scope.split("/"):
        signing = hmac.digest(signing, word.encode(), "sha256")
    signature = hmac.new(signing, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{request}".encode(), "sha256").hexdigest()
    credential = f"Credential={CREDENTIALS['AWS_ACCESS_KEY_ID']}/{scope}"
    return {**headers, "Authorization": f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature}"}
