"""A second rank that serves one group after another, so that tests import torch in it only once.

Standard input: one line of orders (see rank_processes.py) a group.
"""

from __future__ import annotations

import json
import sys

from pagedcli.execution.tensor_parallel import follow_orders

for line in sys.stdin:
    follow_orders(json.loads(line))
