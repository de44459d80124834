"""How a preempted group comes back: by recomputation, by swapping, or by the paper's rule for choosing."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pagedcli.core.config import Preemption
from pagedcli.core.sequence import SequenceGroup


class RecoveryPolicy(ABC):
    """Says whether a group that must leave the device would rather be swapped to the host than recomputed."""

    name: str

    @abstractmethod
    def prefers_swap(self, group: SequenceGroup) -> bool: ...


class AlwaysRecompute(RecoveryPolicy):
    name = "recompute"

    def prefers_swap(self, group: SequenceGroup) -> bool:
        del group
        return False


class AlwaysSwap(RecoveryPolicy):
    """The paper's `always_swap`, used for Figure 19b."""

    name = "swap"

    def prefers_swap(self, group: SequenceGroup) -> bool:
        del group
        return True


class RecomputeSinglesSwapGroups(RecoveryPolicy):
    """The paper's choice (section 4.5): one running sequence is recomputed, several share blocks and are swapped."""

    name = "auto"

    def prefers_swap(self, group: SequenceGroup) -> bool:
        return len(group.live) > 1


def recovery_policy(name: Preemption) -> RecoveryPolicy:
    """The policy behind `--preemption`."""
    policies: tuple[RecoveryPolicy, ...] = (RecomputeSinglesSwapGroups(), AlwaysRecompute(), AlwaysSwap())
    return next(policy for policy in policies if policy.name == name)
