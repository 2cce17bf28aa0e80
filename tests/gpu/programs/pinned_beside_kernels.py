"""Whether taking pinned memory waits for a kernel that runs: then it must never happen beside kernels that wait."""

import time

import torch

torch.cuda.set_device(0)
torch.empty(1 << 20, pin_memory=True)
torch.cuda._sleep(1000)
torch.cuda.synchronize()
for megabytes in (1, 4, 64, 256):
    torch.cuda._sleep(3_000_000_000)  # Clock cycles: one or two seconds
    event = torch.cuda.current_stream().record_event()
    begun = time.monotonic()
    memory = torch.empty(megabytes << 20, dtype=torch.uint8, pin_memory=True)
    seconds, waited = time.monotonic() - begun, event.query()
    torch.cuda.synchronize()
    whole = time.monotonic() - begun
    print(f"{megabytes} MiB of pinned memory after {seconds:.3f} s; the kernel took {whole:.3f} s", flush=True)
    if waited:
        raise SystemExit("taking pinned memory waited for the kernel")
