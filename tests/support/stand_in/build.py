"""Making the stand-in: one compiler call of about 15 s."""

import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "device.cpp"


def build(folder: Path, kind: str = "cuda") -> Path | str:
    """The library, made in `folder`; or why it cannot be made here, in words. kind: "cuda" or "xpu"."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    package = Path(torch.__file__).parent
    headers = package / "include"
    if compiler is None:
        return "no C++ compiler"
    if not headers.is_dir():
        return "this torch has no headers"
    if torch.accelerator.current_accelerator() is not None:
        return "this torch was built for an accelerator"
    library = folder / f"libstand_in_{kind}.so"
    command = [
        *(compiler, "-O0", "-std=c++20", "-fPIC", "-shared", "-w"),
        *(f"-DSTAND_IN_{kind.upper()}", f"-I{headers}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{headers / 'torch/csrc/api/include'}", str(SOURCE), "-o", str(library)),
        *(f"-L{package / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{package / 'lib'}"),
    ]
    made = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if made.returncode:
        return f"the compiler does not take it: {made.stderr.strip().splitlines()[0][:200]}"
    return library
