"""Text to token ids and back, over the `tokenizers` library; chat messages by the model's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from pagedcli.core.errors import CannotRunError, RequestError
from pagedcli.execution.host_memory import give_back
from pagedcli.execution.model_hub import ModelSource

Message = Mapping[str, Any]
TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "tokenizer_config.json")
"""Any of these means that a folder has a tokenizer, of an older layout than tokenizer.json."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's chat format (platform.openai.com/docs/api-reference/chat). Many templates write any role they are
given, so a misspelt one would reach the model as a mark it has never seen."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """`backend` does the work and is safe to share between threads.

    `eos_ids` end a generation; `special` maps names like bos_token to their text; `chat_template` is None for models
    that have none.
    """

    backend: tokenizers.Tokenizer
    eos_ids: frozenset[int]
    special: Mapping[str, str]
    chat_template: str | None

    @cached_property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added ones included; the model's own vocabulary may be larger (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which `decode` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        return self._special_id("pad_token")

    def _special_id(self, name: str) -> int | None:
        text = self.special.get(name)
        return None if text is None else self.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt, with the marks (a leading BOS, say) that the model's tokenizer adds by itself.

        RequestError `invalid_text` for text that cannot be written as UTF-8 (half a surrogate pair).
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeError, TypeError) as fault:
            raise RequestError("invalid_text", f"the prompt is not valid Unicode: {fault}") from fault

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, ending where the assistant's answer begins.

        RequestError `no_chat_template` when the model has none, `unknown_role` for a role that neither OpenAI's format
        nor the template names, `invalid_messages` when the template refuses them.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt),
                           add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model was trained on."""
        if self.chat_template is None:
            raise RequestError("no_chat_template", "the model has no chat template, so it takes prompts, not messages")
        self._check_roles(messages, self.chat_template)
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            names: dict[str, Any] = dict(self.special)
            rendered: Any = render_jinja_template([[dict(message) for message in messages]], **names,
                                                  chat_template=self.chat_template,
                                                  add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError, ValueError, KeyError) as fault:
            raise RequestError("invalid_messages",
                               f"the model's chat template refused the messages: {fault}") from fault
        texts = rendered[0] if isinstance(rendered, tuple) else rendered  # (texts, spans) in transformers 4 and 5
        return str(texts[0])

    @staticmethod
    def _check_roles(messages: Sequence[Message], template: str) -> None:
        for place, message in enumerate(messages):
            role = str(message.get("role"))
            if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
                raise RequestError("unknown_role", f"messages[{place}].role is {role[:40]!r}: must be one of "
                                   f"{', '.join(ROLES)}; the model's chat template names no such role")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids the tokenizer does not know give nothing."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def stream(self, *, skip_special_tokens: bool = True) -> DecodeStream:
        """A decoder that takes ids one by one: `step(self.backend, id)` gives new text or None."""
        return DecodeStream(skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of a piece as it stands in the vocabulary."""
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)

    def piece(self, token: int) -> str | None:
        """The piece with this id as it stands in the vocabulary, before decoding."""
        found = self.backend.id_to_token(token)
        return None if found is None else str(found)


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Tokenizer | None:
    """The model's tokenizer; None for a folder that holds none at all and for dummy shapes: such a model serves
    prompts of token ids only.

    Reads tokenizer.json directly, which takes a tenth of the time of transformers' AutoTokenizer; older layouts go
    through that. CannotRunError when the files do not make a fast tokenizer.
    """
    folder = source.folder
    if folder is None:
        return None
    settings = _read(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as fault:  # the library raises bare Exception
            raise CannotRunError(f"cannot read the tokenizer {file}: {fault}", "bad_tokenizer") from fault
        give_back()  # a third of what reading the file took
    elif not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    else:
        backend = _slow_path(folder, trust_remote_code)
    backend.no_truncation()
    backend.no_padding()
    special = _special_texts(settings, _read(folder / "special_tokens_map.json"))
    return Tokenizer(backend, _eos_ids(source, folder, backend, special), special,
                     _chat_template(folder, settings))


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as fault:
        raise CannotRunError(f"cannot read {file}: {fault}", "bad_tokenizer") from fault
    return value if isinstance(value, dict) else {}


def _slow_path(folder: Path, trust: bool) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    from pagedcli.execution.quiet import quiet_transformers

    try:
        with quiet_transformers():
            made = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
    except Exception as fault:  # missing files, missing libraries and bad files all come as different errors
        reason = str(fault).strip().split("\n")[0]
        raise CannotRunError(f"the folder {folder} holds no tokenizer that can be read: {reason}",
                             "bad_tokenizer") from fault
    backend = getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CannotRunError(f"the tokenizer in {folder} has no fast form (tokenizer.json), which this tool needs; "
                             "convert it with transformers' save_pretrained", "bad_tokenizer")
    return backend


def _special_texts(*files: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        for settings in files:
            value = settings.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                texts[name] = text
                break
    return texts


def _eos_ids(source: ModelSource, folder: Path, backend: tokenizers.Tokenizer,
             special: Mapping[str, str]) -> frozenset[int]:
    """Where transformers' generate would stop: by the generation config, else the config, else the tokenizer."""
    model_config = source.read_config()
    inner = model_config.get("text_config")
    places = [_read(folder / "generation_config.json"), model_config]
    if isinstance(inner, Mapping):
        places.append(dict(inner))
    for settings in places:
        value = settings.get("eos_token_id")
        if isinstance(value, int):
            return frozenset((value,))
        if isinstance(value, list) and value:
            return frozenset(int(item) for item in value)
    found = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return frozenset() if found is None else frozenset((int(found),))


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = settings.get("chat_template", _read(folder / "chat_template.json").get("chat_template"))
    if isinstance(value, list):  # several named templates: the one called default is for plain chat
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None
