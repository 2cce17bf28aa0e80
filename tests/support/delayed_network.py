"""A network that takes its time: every packet between hosts arrives so many seconds after it was sent.

    namespace HOST0  eth0 ---+
                             |   a process that keeps each packet for the delay
    namespace HOST1  eth0 ---+

The devices are TUN devices, so no module of the kernel's traffic control is needed. Packets pass as the sender's TCP
made them, up to 64 KiB each (its segmentation is left undone), so a process of Python keeps up with some Gbit/s.
"""

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 1, 2
HEADER = 10  # Bytes of struct virtio_net_hdr before each packet
ADDRESS = slice(HEADER + 16, HEADER + 20)  # Of the receiver, in the header of IPv4
LARGEST = 1 << 17
AT_ONCE = 64  # Packets of one host that are read before the others have their turn


def add_devices(names: Sequence[str]) -> list[int]:
    """Give each of these namespaces a device eth0, down; returns the files that their packets are read from."""
    files = []
    for number, name in enumerate(names):
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        files.append(file)
        device = f"hvl{os.getpid()}-{number}"
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        command = ["ip", "link", "set", device, "netns", name, "name", "eth0"]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return files


def forward(files: Sequence[int], addresses: Sequence[str], delay: float) -> None:
    """Carry packets between the devices, each after `delay` seconds, until this process is killed."""
    receivers = {bytes(map(int, each.split("."))): file for each, file in zip(addresses, files, strict=True)}
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for file in select.select(files, [], [], left)[0]:
            for _ in range(AT_ONCE):
                try:
                    packet = os.read(file, LARGEST)
                except BlockingIOError:
                    break
                receiver = receivers.get(packet[ADDRESS])
                if receiver is not None:
                    waiting.append((time.monotonic() + delay, receiver, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, receiver, packet = waiting.popleft()
            try:
                os.write(receiver, packet)
            except OSError as error:
                # Of a host whose link is down, or whose queue is full, as on a real wire.
                print(f"a packet was lost: {error}", file=sys.stderr)


def start(names: Sequence[str], addresses: Sequence[str], delay: float) -> subprocess.Popen[bytes]:
    """Add the devices and forward their packets in a process of its own, which ends with this one."""
    files = add_devices(names)
    try:
        command = [
            sys.executable,
            __file__,
            str(delay),
            ",".join(map(str, files)),
            ",".join(addresses),
            str(os.getpid()),
        ]
        return subprocess.Popen(command, pass_fds=files)
    finally:
        for file in files:
            os.close(file)


if __name__ == "__main__":
    _, seconds, opened, receivers, parent = sys.argv
    # PR_SET_PDEATHSIG: also where the parent is killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == int(parent):
        forward(list(map(int, opened.split(","))), receivers.split(","), float(seconds))
