"""Where the launchers of a run meet, and what they tell each other; imported by the agent.

The store listens on the address that was asked for, not on all: whoever reaches it can run code.
"""

import ipaddress
import json
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from rollverify.launch.shutdown import BEFORE_ALL, RankError, read_rank_errors, save_rank_error

POLL_S = 0.5
LAST_WORDS_S = 2.0
"""From a failure to the end of a node's launcher, which waits longer; several polls."""


def listening_socket(address: str, port: int) -> socket.socket:
    """Bound to this address alone; a host's name that leads back to loopback, to all.

    Some systems give their own name 127.0.1.1, where no other machine would find it.
    """
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    host = str(place[0])
    is_own_name = address not in (host, "localhost") and ipaddress.ip_address(host).is_loopback
    return socket.create_server(("" if is_own_name else host, port), family=family)


class BoundRendezvous(StaticTCPRendezvous):
    """Torchrun's static rendezvous whose store is bound to one address."""

    folder: Path | None = None
    """Of the error reports of this node's ranks."""
    ranks_per_node = 1
    relay: "ReportRelay | None" = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Start the store on node 0, and the exchange of reports where there are several."""
        if self._store is None and self.rank == 0:
            listener = listening_socket(self.master_addr, self.master_port)
            self.master_port = listener.getsockname()[1]
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                multi_tenant=False,
                master_listen_fd=listener.detach(),
            )
        info = super().next_rendezvous()
        if self.world_size > 1 and self.folder is not None:
            store: Any = self._store
            relay = ReportRelay(
                store.clone(), self.folder, self.rank, self.world_size, self.ranks_per_node
            )
            BoundRendezvous.relay = relay
            threading.Thread(target=relay.run, name="reports", daemon=True).start()
        return info


class ReportRelay:
    """Brings the error reports of every node to every node, and names a node that is gone."""

    def __init__(
        self, store: Any, folder: Path, node: int, num_nodes: int, ranks_per_node: int
    ) -> None:
        self._store = PrefixStore("rollverify/nodes", store)
        self._folder, self._node, self._ranks_per_node = folder, node, ranks_per_node
        self._others = [other for other in range(num_nodes) if other != node]
        self._seen: set[int] = set()
        """Ranks whose report came from another node."""
        self._beats = 0
        self._has_failed, self.last_words_said = threading.Event(), threading.Event()

    def run(self) -> None:
        """Until a rank here has failed, or the process ends; nothing waits for it."""
        while not self._has_failed.wait(POLL_S):
            try:
                self._exchange()
            except RuntimeError:  # The store is part of node 0's launcher.
                # At the end of a run all launchers leave, that one first, and nobody has failed.
                if not self._has_failed.wait(4 * POLL_S):
                    self._report_gone(0)
                return

    def say_last_words(self) -> None:
        """After a failure here: tell the others, hear them, and name those that are gone."""
        self._has_failed.set()
        try:
            self._exchange()
            before = self._beats_of_others()
            time.sleep(LAST_WORDS_S - POLL_S)
            self._exchange()
            after = self._beats_of_others()
            gone = [other for other in self._others if before[other] == after[other]]
        except RuntimeError:
            gone = [0]
        for other in gone:
            self._report_gone(other)
        self.last_words_said.set()

    def _exchange(self) -> None:
        own = [e for e in read_rank_errors(self._folder) if e.rank not in self._seen]
        if own:
            self._store.set(f"reports/{self._node}", json.dumps([asdict(error) for error in own]))
        self._beats += 1
        self._store.set(f"beats/{self._node}", str(self._beats))
        self._store.set(f"host/{self._node}", socket.gethostname())
        for other in self._others:
            if self._store.check([f"reports/{other}"]):
                for values in json.loads(self._store.get(f"reports/{other}")):
                    self._seen.add(values["rank"])
                    save_rank_error(RankError(**values), self._folder)

    def _beats_of_others(self) -> dict[int, bytes]:
        keys = {other: f"beats/{other}" for other in self._others}
        return {
            other: self._store.get(key) if self._store.check([key]) else b""
            for other, key in keys.items()
        }

    def _report_gone(self, node: int) -> None:
        host = ""
        if node and self._store.check([f"host/{node}"]):
            host = f" ({self._store.get(f'host/{node}').decode()})"
        report = RankError(
            rank=node * self._ranks_per_node,
            time=BEFORE_ALL,
            kind="internal",
            message=f"node {node}{host} is gone: its launcher or the machine has ended",
            traceback="",
        )
        self._seen.add(report.rank)
        save_rank_error(report, self._folder)
