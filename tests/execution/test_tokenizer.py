"""The tokenizer wrapper, over a byte-level tokenizer made here, and against transformers on the same folder."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from pagedcli.core.errors import CannotRunError, RequestError
from pagedcli.execution.model_hub import ModelSource
from pagedcli.execution.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = ("{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant: {% endif %}")
TEXTS = ["plain", "naïve Ünïcode", "世界你好", "👩‍👩‍👧 family", "tabs\tand\nlines", "", "<s>special</s>"]


def make_folder(folder: Path, template: str | None = TEMPLATE, bos: bool = True) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.enable_truncation(8)  # a setting that files from training runs carry, and that must not cut prompts
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"},
                "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 257}')
    return folder


def tokenizer(folder: Path) -> Tokenizer:
    made = load_tokenizer(ModelSource("test", folder))
    assert made is not None
    return made


def test_text_survives_a_round_trip(tmp_path: Path) -> None:
    ours = tokenizer(make_folder(tmp_path))
    for text in TEXTS[:-1]:
        assert ours.encode(text)[0] == ours.bos_id == 256
        assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode("x" * 100)) == 101
    assert ours.decode(ours.encode("a</s>b")) == "ab"
    assert ours.decode(ours.encode("a</s>b"), skip_special_tokens=False) == "<s>a</s>b"


def test_ids_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = tokenizer(make_folder(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Hi, 世界"}, {"role": "assistant", "content": "yes"}]
    assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_chat_faults_belong_to_the_request(tmp_path: Path) -> None:
    ours = tokenizer(make_folder(tmp_path / "a", template=None))
    with pytest.raises(RequestError, match="no chat template") as fault:
        ours.encode_chat([{"role": "user", "content": "x"}])
    assert fault.value.code == "no_chat_template"
    strict = tokenizer(make_folder(tmp_path / "b", template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(RequestError, match="roles must alternate"):
        strict.encode_chat([{"role": "user", "content": "x"}])


def test_roles_are_openai_s_or_the_template_s_own(tmp_path: Path) -> None:
    """This template writes any role it is given, so that a misspelt one would pass for a turn of its own."""
    ours = tokenizer(make_folder(tmp_path / "any"))
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert f"<s>{role}: x</s>" in ours.render_chat([{"role": role, "content": "x"}])
    with pytest.raises(RequestError) as fault:
        ours.encode_chat([{"role": "user", "content": "x"}, {"role": "asistant", "content": "y"}])
    assert fault.value.code == "unknown_role"
    assert fault.value.message == ("messages[1].role is 'asistant': must be one of system, developer, user, assistant, "
                                   "tool, function; the model's chat template names no such role")
    knows = tokenizer(make_folder(tmp_path / "own", TEMPLATE + "{% if messages[0].role == 'ipython' %}!{% endif %}"))
    assert knows.render_chat([{"role": "ipython", "content": "x"}]).endswith("!")
    with pytest.raises(RequestError, match=r"messages\[0\].role is 'model'"):
        knows.encode_chat([{"role": "model", "content": "x"}])


def test_half_a_surrogate_pair_is_the_requests_fault(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as fault:
        tokenizer(make_folder(tmp_path)).encode("a\ud83d")
    assert fault.value.code == "invalid_text"


def test_end_of_text_follows_generate(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert tokenizer(folder).eos_ids == {257}
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert tokenizer(folder).eos_ids == {5, 7}
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert tokenizer(folder).eos_ids == {257}  # the tokenizer's own


def test_named_templates_and_template_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template=None)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert tokenizer(folder).render_chat([{"role": "user", "content": "hi"}]) == "hi</s>"
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer(folder).render_chat([]) == "yes"


def test_many_threads_encode_at_once(tmp_path: Path) -> None:
    ours = tokenizer(make_folder(tmp_path))
    texts = [text * (1 + i % 7) for i, text in enumerate(TEXTS * 40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ours.encode, texts)) == [ours.encode(text) for text in texts]


def test_a_stream_gives_the_text_piece_by_piece(tmp_path: Path) -> None:
    ours = tokenizer(make_folder(tmp_path))
    stream = ours.stream()
    pieces = [stream.step(ours.backend, i) or "" for i in ours.encode("né 👩‍👩‍👧")]
    assert "".join(pieces) == "né 👩‍👩‍👧" and "\ufffd" not in "".join(pieces)


def test_pieces_and_special_ids(tmp_path: Path) -> None:
    ours = tokenizer(make_folder(tmp_path))
    assert ours.special_ids == {256, 257} and ours.vocab_size == 258
    assert ours.piece(257) == "</s>" and ours.piece(99999) is None and ours.token_to_id("nothing") is None


def test_a_broken_or_missing_tokenizer_says_so(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CannotRunError, match=r"tokenizer\.json"):
        tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CannotRunError, match="no tokenizer"):
        tokenizer(folder)
    assert load_tokenizer(ModelSource("shape", None, True, {})) is None
