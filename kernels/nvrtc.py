"""nvrtc.py SOURCE OUT: CUDA C++ to PTX for compute_80 and later, by the NVRTC library of the Python environment."""

import ctypes
import sys
from pathlib import Path

OPTIONS = [b"--gpu-architecture=compute_80", b"--std=c++17", b"-default-device"]


class Nvrtc:
    def __init__(self):
        found = Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
        self.lib = ctypes.CDLL(str(next(found)))
        self.program = ctypes.c_void_p()

    def call(self, name, *args):
        status = getattr(self.lib, name)(*args)
        if status:
            sys.exit(f"{name} failed with {status}\n{self.text('nvrtcGetProgramLog').decode()}")

    def text(self, name):
        size = ctypes.c_size_t()
        getattr(self.lib, f"{name}Size")(self.program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.lib, name)(self.program, buffer)
        return buffer.raw.rstrip(b"\0")

    def ptx(self, source):
        name = source.name.encode()
        self.call("nvrtcCreateProgram", ctypes.byref(self.program), source.read_bytes(), name, 0, None, None)
        self.call("nvrtcCompileProgram", self.program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS))
        return self.text("nvrtcGetPTX")


source, out = map(Path, sys.argv[1:])
out.write_bytes(Nvrtc().ptx(source))
