"""The program of ranks above 0 that rank 0 starts: orders on standard input, then plans until it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading


def main() -> None:
    """Serve as one rank. Ends at once when standard input does: rank 0 is gone then, or wants no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides what it means
    orders = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from pagedcli.execution.tensor_parallel import follow_orders

    follow_orders(orders)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
