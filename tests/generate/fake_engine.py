"""A small engine with the real one's face: bytes as tokens, fixed words as answers, one token a sequence a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pagedcli.core.config import RunConfig
from pagedcli.core.errors import RequestError
from pagedcli.core.request import Request
from pagedcli.core.sequence import Sequence, SequenceGroup, Status, TokenChoice
from pagedcli.engine.interface import Counters
from pagedcli.execution.interface import ExecutorInfo, ExecutorLimits
from pagedcli.memory.interface import Usage

ANSWER = "the quick brown fox jumps over a lazy dog; "


class ByteTokenizer:
    """Token ids are UTF-8 bytes; a conversation is its lines, each with its role in front."""

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.calls += 1
        return [self.encode(text) for text in texts]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if messages[-1]["role"] == "teapot":
            raise RequestError("chat_template", "the chat template knows no role teapot")
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return bytes(ids).decode("utf-8", "replace")


class _Executor:
    def __init__(self, limits: ExecutorLimits, info: ExecutorInfo) -> None:
        self.limits = limits
        self.info = info


class FakeEngine:
    """`answer` gives the ids that follow a prompt. `served` lists the index of every finished request, in order.
    `after` is called with each finished group and may raise."""

    def __init__(self, config: RunConfig, *, positions: int = 512, blocks: int = 1024, answer: str = ANSWER,
                 after: Callable[[SequenceGroup], None] | None = None, tokenizer: Any = None) -> None:
        limits = ExecutorLimits(num_blocks=config.cache.num_blocks or blocks, host_blocks=0,
                                block_size=config.cache.block_size, max_positions=positions, vocab_size=256,
                                bytes_per_block=16)
        info = ExecutorInfo(model=config.model.model, device="none", dtype="none", kv_dtype="none", attention="none",
                            threads=1, load_seconds={"load": 0.0})
        self.executor = _Executor(limits, info)
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.counters = Counters(waste_sum={"token": 0.0, "free": 0.0})
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.max_model_len = positions
        self.served: list[int] = []
        self.most_queued = 0
        self.closed = False
        self._answer = list(answer.encode())
        self._after = after
        self._groups: list[SequenceGroup] = []

    def add(self, request: Request) -> SequenceGroup:
        limits, prompt = self.executor.limits, len(request.prompt)
        wanted = request.params.max_tokens
        if prompt + (1 if wanted is None else wanted) > limits.max_positions:
            raise RequestError("too_long", f"{prompt} prompt tokens and max_tokens {wanted}: above the limit of "
                               f"{limits.max_positions}")
        slots = limits.num_blocks * limits.block_size
        room = min(limits.max_positions, slots) - prompt
        need = prompt + (1 if wanted is None else wanted)
        if need > slots:
            raise RequestError("exceeds_kv_pool", f"needs {-(-need // limits.block_size)} KV blocks and the pool has "
                               f"{limits.num_blocks}")
        group = SequenceGroup(request, len(self.served))
        group.max_output = room if wanted is None else wanted
        group.cached_tokens = 0
        for sample in range(request.params.samples):
            group.live.append(Sequence(sample, group, list(request.prompt), prompt, sample))
            group.live[-1].logprobs = None if request.params.logprobs is None else []
        self.counters.prompt_tokens += prompt
        self._groups.append(group)
        self.most_queued = max(self.most_queued, len(self._groups))
        return group

    def step(self) -> list[SequenceGroup]:
        self.counters.steps += 1
        self.counters.peak_used_blocks = max(self.counters.peak_used_blocks, len(self._groups))
        finished = []
        for group in self._groups[:self.max_num_seqs]:
            for seq in list(group.live):
                self._advance(group, seq)
            if not group.live:
                finished.append(group)
        for group in finished:
            self._groups.remove(group)
            group.status = Status.FINISHED
            self.served.append(group.request.index)
            if self._after is not None:
                self._after(group)
        return finished

    def _advance(self, group: SequenceGroup, seq: Sequence) -> None:
        if seq.output_len < group.max_output:
            token = self._answer[(seq.output_len + seq.sample) % len(self._answer)]
            seq.tokens.append(token)
            seq.cumulative_logprob -= 0.5
            if seq.logprobs is not None:
                wanted = group.params.logprobs or 0
                top = tuple((other, -1.0 if other < 2 else float("-inf")) for other in range(wanted))
                seq.logprobs.append(TokenChoice(seq.id, token, -0.5, top))
            self.counters.output_tokens += 1
        if seq.output_len >= group.max_output:
            seq.finish_reason = "length"
            seq.text = bytes(seq.output_ids).decode("utf-8", "ignore")
            if group.params.prompt_logprobs is not None:
                group.prompt_logprobs = [None, *(((token, -0.25), (0, -2.0)) for token in group.request.prompt[1:])]
            group.live.remove(seq)
            group.done.append(seq)

    def pin_prefix(self, tokens: list[int]) -> int:
        self.pinned = list(tokens)
        if len(tokens) > self.executor.limits.max_positions:
            raise RequestError("too_long", f"the prefix has {len(tokens)} tokens")
        return len(tokens) // 16 * 16

    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def depth(self) -> tuple[int, int, int]:
        return len(self._groups), 0, 0

    def usage(self) -> Usage:
        return Usage(token=1, reserved=0, internal=0, external=0, free=9, logical=1, physical=1)

    def close(self) -> None:
        self.closed = True


def lines(*rows: Any) -> bytes:
    """JSON Lines; strings and bytes stand as they are."""
    return b"".join((row if isinstance(row, bytes) else row.encode() if isinstance(row, str)
                     else json.dumps(row, ensure_ascii=False).encode()) + b"\n" for row in rows)
