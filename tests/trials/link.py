"""Two machines, made of network namespaces, and the link between them: slow, or broken."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "lan"
_TUN, _SET_TUN, _FLAGS = "/dev/net/tun", 0x400454CA, 0x1001  # IFF_TUN | IFF_NO_PI
_PACKET = 65536  # bytes, at most
_numbers = itertools.count()


def why_no_machines() -> str | None:
    """Why this system can't make two machines, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid():
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "there is no ip; install iproute2"
    name = f"attnlm-{os.getpid()}"
    try:
        with _namespace(name):
            os.close(_tun(f"at{os.getpid()}"))
            subprocess.run(["unshare", "--mount", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this system has no network namespaces, tun devices or mounts for us: {error}"
    return None


@dataclass
class Link:
    """Carries packets between two machines, each after `delay` seconds."""

    delay: float = 0.0
    rate: float = 1e9
    """Bits per second, each way."""
    is_cut: bool = False
    """Packets are lost, and neither side is told."""
    ends: list[int] = field(default_factory=list)
    _is_over: bool = False

    def carry(self) -> None:
        """Carries until `close`."""
        waiting: list[tuple[float, int, int, bytes]] = []  # when, number, where to, what
        numbers, free = itertools.count(), dict.fromkeys(self.ends, 0.0)
        while not self._is_over:
            left = waiting[0][0] - time.monotonic() if waiting else 0.1
            for end in select.select(self.ends, [], [], max(0.0, min(left, 0.1)))[0]:
                packet, other = os.read(end, _PACKET), self.ends[end == self.ends[0]]
                free[end] = max(free[end], time.monotonic()) + 8 * len(packet) / self.rate
                heapq.heappush(waiting, (free[end] + self.delay, next(numbers), other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(waiting)
                if not self.is_cut:
                    with contextlib.suppress(OSError):  # that end is down
                        os.write(other, packet)

    def close(self) -> None:
        """Ends `carry`."""
        self._is_over = True


@dataclass(frozen=True)
class Machine:
    """A machine with a network and a file system of its own: `home` is another folder on each."""

    namespace: str
    address: str
    folder: Path
    """Its home, as it is called outside."""
    home: Path
    """As it is called inside."""

    def command(self, *arguments: object) -> list[str]:
        """The command line that runs a command on this machine, at home."""
        enter = 'mount --bind "$0" "$1" && cd "$1" && shift && exec "$@"'
        inside = ("ip", "netns", "exec", self.namespace, "sh", "-c", enter, self.folder, self.home)
        return [*map(str, inside), *map(str, arguments)]

    def pids(self) -> list[int]:
        """Return the processes that run on it."""
        listed = ("ip", "netns", "pids", self.namespace)
        return [*map(int, subprocess.run(listed, capture_output=True, check=True).stdout.split())]

    def unplug(self) -> None:
        """Takes its network away, which its programs are not told either."""
        _ip("-n", self.namespace, "link", "set", DEVICE, "down")


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine, Link]]:
    """Two machines with folders in `folder`, and the link between them."""
    home = folder / "home"
    home.mkdir(parents=True)
    link = Link()
    with contextlib.ExitStack() as stack:
        machines = []
        for number, address in enumerate(ADDRESSES):
            end = f"{os.getpid()}-{next(_numbers)}"
            name = f"attnlm-{end}"
            stack.enter_context(_namespace(name))
            link.ends.append(_tun(f"at{end}"))
            stack.callback(os.close, link.ends[-1])
            _ip("link", "set", f"at{end}", "netns", name, "name", DEVICE)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", name, "link", "set", device, "up")
            machines.append(Machine(name, address, folder / f"machine-{number}", home))
            machines[-1].folder.mkdir()
        carrier = threading.Thread(target=link.carry)
        carrier.start()
        stack.callback(carrier.join)
        stack.callback(link.close)
        yield machines[0], machines[1], link


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[None]:
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _ip("netns", "delete", name)


def _tun(name: str) -> int:
    """A network device whose packets are read and written here; it is gone once closed."""
    end = os.open(_TUN, os.O_RDWR)
    fcntl.ioctl(end, _SET_TUN, struct.pack("16sH22x", name.encode(), _FLAGS))
    return end


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
