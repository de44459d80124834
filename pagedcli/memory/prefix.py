"""Finds full blocks by the tokens that lead to them, so that prompts with a common start share their cache.

The chain of hashes is a tree of dictionaries: a block's key is its own tokens under the node of the block before it,
hashed by Python and then compared in full. Two different texts therefore never meet, whatever their hashes, and a node
that lost its block keeps its place while anything below it lives.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedcli.memory.pool import BlockPool

Key = tuple[int, ...]


class Node:
    """One full block's place in the tree. `users` counts the block tables whose last offered block it is."""

    __slots__ = ("block", "children", "parent", "tokens", "users")

    def __init__(self, parent: Node | None, tokens: Key) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block: int | None = None
        self.children: dict[Key, Node] = {}
        self.users = 0


class PrefixCache:
    """The blocks of one pool that can be found by content.

    It holds no references (pinned blocks apart): a block without holders turns idle in the pool, where it can be found
    until the pool needs it for something else, the least recently released first.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node(None, ())
        self.pinned: set[int] = set()
        self._pool = pool
        self._node_of: dict[int, Node] = {}
        pool.evicting = self._evicted

    def __len__(self) -> int:
        return len(self._node_of)

    def key(self, tokens: Sequence[int], index: int) -> Key:
        """Tokens of full block number `index`."""
        return tuple(tokens[index * self.block_size:(index + 1) * self.block_size])

    def match(self, tokens: Sequence[int], most: int) -> tuple[list[int], Node]:
        """Blocks that hold the first full blocks of `tokens`, at most `most`, and the node reached."""
        node = self.root
        found: list[int] = []
        while len(found) < most and node.children:
            child = node.children.get(self.key(tokens, len(found)))
            if child is None or child.block is None:
                break
            found.append(child.block)
            node = child
        return found, node

    def extend(self, node: Node, tokens: Key, block: int) -> Node:
        """The node one block further on. Offers `block` there unless another block with the same past is offered."""
        child = node.children.get(tokens)
        if child is None:
            child = node.children[tokens] = Node(node, tokens)
        if child.block is None:
            self._offer(child, block)
        return child

    def enter(self, node: Node) -> None:
        """A table's last offered block is here."""
        node.users += 1

    def leave(self, node: Node) -> None:
        """Undo `enter`; places that nothing needs any more go."""
        node.users -= 1
        self._prune(node)

    def restore(self, tip: Node, blocks: Sequence[int], depth: int) -> None:
        """A table came back from the host in new blocks: offer its first `depth`, whose last node is `tip`, again."""
        node = tip
        for index in range(depth - 1, -1, -1):
            if node.block is None:
                self._offer(node, blocks[index])
            assert node.parent is not None, "a table has more offered blocks than its node is deep"
            node = node.parent

    def pin(self, tokens: Sequence[int]) -> list[int]:
        """Hold the leading full blocks of `tokens` that are found, for good. Returns those newly held from idle."""
        blocks, _ = self.match(tokens, len(tokens) // self.block_size)
        woken = []
        for block in blocks:
            if block not in self.pinned:
                self.pinned.add(block)
                if self._pool.share(block):
                    woken.append(block)
        return woken

    def unpin(self) -> list[int]:
        """Forget what was pinned. Returns the blocks, whose references the caller now drops."""
        blocks = list(self.pinned)
        self.pinned.clear()
        return blocks

    def forget(self) -> None:
        """Make every block that is not pinned impossible to find; idle ones become free."""
        for block in [block for block in self._node_of if block not in self.pinned]:
            self._pool.unkeep(block)
            self._evicted(block)

    def _offer(self, node: Node, block: int) -> None:
        node.block = block
        self._node_of[block] = node
        self._pool.keep(block)

    def _evicted(self, block: int) -> None:
        node = self._node_of.pop(block)
        node.block = None
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.block is None and not node.users and not node.children and node.parent is not None:
            del node.parent.children[node.tokens]
            node = node.parent

    def check(self, tips: dict[int, int]) -> None:
        """The tree and the pool agree; `tips` counts tables by the id of their node. Raises AssertionError."""
        seen: dict[int, Node] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            assert node.users == tips.get(id(node), 0), f"a node counts {node.users} tables, {tips.get(id(node), 0)} do"
            if node is self.root:
                continue
            assert node.block is not None or node.users or node.children, "a useless node was not pruned"
            assert node.parent is not None and node.parent.children[node.tokens] is node, "a node lost its place"
            assert len(node.tokens) == self.block_size, f"a node of {len(node.tokens)} tokens is not a full block"
            if node.block is not None:
                assert node.block not in seen, f"block {node.block} is offered twice"
                seen[node.block] = node
        assert seen == self._node_of, "blocks offered and nodes in the tree differ"
        lost = self.pinned - set(seen)
        assert not lost, f"pinned blocks {sorted(lost)} can no longer be found"
