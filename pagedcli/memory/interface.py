"""The contract of every memory system: who may enter, where each token's keys and values go, what is wasted.

Pairs `can_x` / `x`: the question changes nothing, and the act never fails after a yes. All methods speak of
core's Sequence and SequenceGroup; block ids are indices into the device pool (or the host pool for swap).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum

from pagedcli.core.errors import UsageError
from pagedcli.core.sequence import Sequence, SequenceGroup

Move = tuple[int, int]
"""(source block, destination block)."""


class Verdict(Enum):
    """Answer to `can_admit`: YES now; LATER when others have left; NEVER, however long one waits."""

    YES = "yes"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Admission:
    """What a group got on entry. `cached_tokens`: prompt tokens of its first sequence found in the prefix cache."""

    blocks: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots of the pool by use, in tokens; the five add to the pool at all times (paper Figure 2's classes).

    token: filled slots of running sequences. reserved: will be filled later by the sequence that holds them.
    internal: held by a sequence that will never fill them. external: lost between allocations (buddy rounding).
    free: may be handed out (blocks kept only by the prefix cache count as free).
    `logical`: blocks summed over block tables; `physical`: distinct blocks held by sequences.
    """

    token: int
    reserved: int
    internal: int
    external: int
    free: int
    logical: int
    physical: int

    @property
    def total(self) -> int:
        return self.token + self.reserved + self.internal + self.external + self.free

    def shares(self) -> dict[str, float]:
        """The five classes as shares of the pool, adding to 1."""
        total = max(self.total, 1)
        return {"token": self.token / total, "reserved": self.reserved / total, "internal": self.internal / total,
                "external": self.external / total, "free": self.free / total}


class MemoryPolicy(ABC):
    """A KV memory system over `num_blocks` device blocks of `block_size` slots (and `host_blocks` for swap)."""

    name: str
    block_size: int
    num_blocks: int
    host_blocks: int = 0

    shares_prompt: bool = True
    """Whether n samples share one prompt computation. False: a group enters with n sequences, n reservations."""

    preemptible: bool = True
    """Whether running groups may be preempted (paged) or hold their reservation to the end (the baselines)."""

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at all: the most that `blocks_for_ever` may ask for (the pool, less what is
        pinned for good)."""
        return self.num_blocks

    @property
    def refusal_stands(self) -> bool:
        """Whether a group that was refused entry or return stays refused until some sequence has left or dropped
        memory: true where others only grow, false where what they compute can be found and shared."""
        return False

    def steady_until(self, seq: Sequence) -> int:
        """The largest length to which `seq` can grow, one token a step, while `append` and `computed` change nothing
        but the count of its own filled slots. A simulation need not call them on the way. 0: call them each step."""
        del seq
        return 0

    @abstractmethod
    def blocks_for_ever(self, group: SequenceGroup, max_len: int) -> int:
        """Most blocks that the group can ever need at once when each sequence grows to `max_len` tokens (pinned blocks
        it finds left out). More than `capacity`: refuse it at once. Raises RequestError when the policy
        cannot reserve for this request at all."""

    @abstractmethod
    def can_admit(self, group: SequenceGroup, *, running: bool = True) -> Verdict:
        """Whether all live sequences of a waiting group fit now. `running`: whether any group runs (else the
        watermark is waived, so that a lone group which fits is never kept out)."""

    @abstractmethod
    def admit(self, group: SequenceGroup) -> Admission:
        """Give every live sequence a table covering its present tokens, and set each one's `computed` to the
        tokens already in shared blocks (always leaving at least the last token to compute).

        A group re-entering after recompute may have several live sequences: each shares the full blocks of the
        prefix that it has in common with those before it in `live`, where the policy shares. Those blocks are filled
        by the earlier sequence, so a step must not compute a later one before it (the same step is fine), and until
        then the group's sequences are freed together or not at all.
        """

    @abstractmethod
    def can_append(self, group: SequenceGroup) -> bool:
        """Whether every live sequence of a running group can get the slot for its last token (its own
        new block or copy-on-write included)."""

    @abstractmethod
    def append(self, seq: Sequence) -> list[Move]:
        """Make sure `seq` can write its token at position `length - 1`: a new block when the last is full, a private
        copy when the last is shared. Returns copies to run before the step. Idempotent within a step."""

    @abstractmethod
    def fork(self, parent: Sequence, child: Sequence) -> list[Move]:
        """Child starts with the parent's cache. Sharing policies raise reference counts; others return copies, to run
        before the next step, into the reservation of a sequence of the group that was freed just before: free
        dropped sequences first, then fork."""

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """Drop a sequence's blocks (finished, dropped beam, recompute, abort). Works in any state: running, swapped,
        waiting or already freed (nothing happens)."""

    @abstractmethod
    def computed(self, seq: Sequence, upto: int) -> None:
        """Told when tokens up to position `upto` (exclusive) are in the current plan or cache: full blocks may be
        offered to others from now on (a step writes all keys of a layer before it reads any)."""

    @abstractmethod
    def table(self, seq: Sequence) -> Seq[int]:
        """Block table of a running sequence, in token order: a live view, constant until the next plan."""

    @abstractmethod
    def usage(self) -> Usage: ...

    @abstractmethod
    def check(self) -> None:
        """Prove every invariant; raises AssertionError with what broke. For tests: O(pool)."""

    def start_pin(self) -> None:
        """Begin to keep a shared prefix (see PagedMemory). UsageError where nothing can be shared."""
        raise UsageError(f"--shared-prefix: the memory policy {self.name} shares nothing; use --policy paged")

    def pin(self, tokens: Seq[int]) -> int:
        """Keep the leading full blocks of `tokens`, which have just been computed. Returns the tokens they hold."""
        del tokens
        return 0

    def can_swap_out(self, group: SequenceGroup) -> bool:
        del group
        return False

    def swap_out(self, group: SequenceGroup) -> list[Move]:
        """Move all blocks of the group to the host, shared ones once. (device, host) pairs."""
        raise AssertionError(f"{self.name} does not swap; ask can_swap_out first")

    def can_swap_in(self, group: SequenceGroup, *, running: bool = True) -> bool:
        del group, running
        return False

    def swap_in(self, group: SequenceGroup) -> list[Move]:
        """Bring a swapped group back. (host, device) pairs."""
        raise AssertionError(f"{self.name} does not swap; ask can_swap_in first")

    def swap_blocks(self, group: SequenceGroup) -> int:
        """Distinct device blocks of the group: what swapping it out would need on the host."""
        del group
        return 0
