"""Run the Python of pages on the ranks of a job: python runner.py PAGE...

The blocks of a page run in their order in one namespace, a module of its own, so that what they define can be sent by
name. Names that a page leaves to the reader come from its prelude (preludes/PAGE.py), which runs before each block.
"""

import linecache
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.documentation.blocks import blocks_of, program_of

import hvlike
from hvlike import rpc

PRELUDES = Path(__file__).parent / "preludes"


def run_page(page: Path) -> int:
    """Run what a page shows; returns how many blocks that were."""
    name = "page_" + page.stem.replace("-", "_")
    module = ModuleType(name)
    sys.modules[name] = module
    prelude = PRELUDES / f"{page.stem.replace('-', '_').lower()}.py"
    count = 0
    for block in blocks_of(page):
        program = program_of(block)
        if program is not None:
            if prelude.exists():
                exec(compile(prelude.read_text(), str(prelude), "exec"), module.__dict__)
            # Tracebacks name page and line.
            exec(compile("\n" * (block.line - 1) + program, str(page), "exec"), module.__dict__)
            count += 1
    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    hvlike.shutdown()
    return count


def main() -> None:
    """Run the pages that are named, each in a folder of its own, the same on all ranks."""
    folder = Path(os.environ["TMPDIR"])
    for page in map(Path, sys.argv[1:]):
        (folder / page.stem).mkdir(exist_ok=True)
        os.chdir(folder / page.stem)
        linecache.clearcache()
        hvlike.init()
        start = time.monotonic()
        rank = hvlike.rank()
        count = run_page(page)
        if rank == 0 and count:
            print(f"{page.name}: {count} blocks ran, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
