"""The server of the examples, under load from OpenAI's client.

``PREFIX_PREFILL_EXAMPLES`` makes the load heavier, as in the soak session: ten requests an example.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers
import uvicorn
from prefix_prefill._paged import ops
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

openai = pytest.importorskip("openai", reason="the server is tested by OpenAI's client")

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
REQUESTS = max(200, 10 * int(os.environ.get("PREFIX_PREFILL_EXAMPLES", "0")))
PAGES = 14

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(ops.interpreted(), reason="an interpreted model takes minutes"),
]


@pytest.fixture
def serve(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("serve")


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application from a thread; yield its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@contextlib.contextmanager
def asked(app: Any) -> Iterator[Any]:
    """Serve an application; yield how to ask it."""
    with served(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
        with openai.OpenAI(**options) as client:
            batcher = app.state.batcher
            yield SimpleNamespace(openai=client, options=options, http=http, batcher=batcher)


@pytest.fixture
def client(serve):
    """A server whose cache holds a few sequences, and how to ask it."""
    with asked(serve.make_app(PAGES)) as client:
        yield client


def wait_until_idle(client: Any) -> dict[str, int]:
    """Wait until no request is left, and return the server's counts."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        health = client.http.get("/health").json()
        if health["waiting"] == health["running"] == 0:
            assert health["free_pages"] == health["pages"]
            assert not client.batcher.answers
            return health
        time.sleep(0.05)
    raise AssertionError(f"requests are left: {health}")


async def ask(client: Any, body: dict[str, Any], leave_after: int | None) -> Any:
    """Return text, reason and tokens of an answer, ``"left"``, or the code of an error."""
    create = client.chat.completions if "messages" in body else client.completions
    if body["stream"]:
        body = {**body, "stream_options": {"include_usage": True}}
    elif leave_after is not None:
        client = create._client.with_options(timeout=0.02 * (1 + leave_after))
        create = client.chat.completions if "messages" in body else client.completions
    try:
        reply = await create.create(model="tiny", **body)
        if not body["stream"]:
            choice = reply.choices[0]
            text = choice.message.content if "messages" in body else choice.text
            return text, choice.finish_reason, reply.usage
        text, reason, usage = "", None, None
        async with reply:
            async for piece in reply:
                # the usage comes last, and in a piece of its own
                assert usage is None
                usage = piece.usage
                for choice in piece.choices:
                    assert reason is None
                    reason = choice.finish_reason
                    text += choice.delta.content if "messages" in body else choice.text
                if leave_after is not None and len(text) > leave_after:
                    return "left"
        return text, reason, usage
    except openai.APITimeoutError:
        return "left"
    except openai.BadRequestError as error:
        return error.code


class Expected:
    """What the model says without a cache, letter by letter."""

    def __init__(self, serve: ModuleType) -> None:
        self.engine, self.letters = serve.engine, serve.Letters()
        self.model = self.engine.Decoder()
        self.known: dict[str, list[int]] = {}

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return self.letters.chat(body["messages"])
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) else self.letters.encode(prompt)

    def answer(self, body: dict[str, Any], most: int) -> tuple[str, str, int, int]:
        """Return the text, why it ends, and how many tokens prompt and answer have."""
        prompt = self.tokens_of(body)
        key = str(prompt)
        if len(self.known.get(key, [])) < most:
            self.known[key] = self.engine.without_cache(self.model, prompt, most)
        tokens = self.known[key][:most]
        for count in range(1, len(tokens) + 1):
            text = self.letters.decode(tokens[:count])
            stops = [stop for stop in body.get("stop", []) if stop in text]
            if stops:
                text = text[: min(text.index(stop) for stop in stops)]
                return text, "stop", len(prompt), count
        reason = "stop" if tokens[-1] == self.engine.END else "length"
        return self.letters.decode(tokens), reason, len(prompt), len(tokens)


def test_nothing_is_lost_under_load(serve, client):
    engine, letters, rng = serve.engine, serve.Letters(), random.Random(4)
    system = [rng.randrange(8, engine.VOCABULARY) for _ in range(2 * engine.PAGE + 1)]
    prompts = [[rng.randrange(8, engine.VOCABULARY) for _ in range(1 + i)] for i in range(16)]
    prompts += [system + prompt for prompt in prompts[::4]]
    # of which some need several chunks, and the last more than any other leaves room for
    prompts += [(prompts[-1] * 4)[: 3 * engine.TOKENS_PER_STEP]]
    room = PAGES * engine.PAGE
    expected = Expected(serve)
    bodies, leaves = [], []
    for i in range(REQUESTS):
        prompt, most = rng.choice(prompts), rng.randint(1, 6)
        if i % 20 == 7:
            prompt = [8] * (room + i)
        text = letters.decode(prompt)
        if i % 4 == 0:
            body = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": most}
        else:
            body = {"prompt": prompt if i % 4 == 1 else text, "max_tokens": most}
        if i % 3 == 1 and len(prompt) < room:
            # the end of an answer, of which the last two letters have to come from two tokens
            body["stop"] = ["nowhere", expected.answer(body, most)[0][-2:] or "none"]
        bodies.append({**body, "stream": i % 3 != 0, "temperature": 0})
        leaves.append(rng.randrange(4) if i % 5 == 1 else None)

    async def all_at_once() -> list[Any]:
        async with openai.AsyncOpenAI(**client.options, timeout=300) as asking:
            each = (ask(asking, *each) for each in zip(bodies, leaves, strict=True))
            return await asyncio.gather(*each)

    answers = asyncio.run(all_at_once())
    health = wait_until_idle(client)

    counts: Counter[str] = Counter()
    for body, leave, answer in zip(bodies, leaves, answers, strict=True):
        if len(expected.tokens_of(body)) > room:
            assert answer == "context_length_exceeded"
            counts["refused"] += 1
        elif answer == "left":
            assert leave is not None
            counts["left"] += 1
        else:
            most = body.get("max_tokens") or body["max_completion_tokens"]
            text, reason, usage = answer
            counted = usage.prompt_tokens, usage.completion_tokens
            assert (text, reason, *counted) == expected.answer(body, most)
            assert usage.total_tokens == sum(counted)
            counts["answered"] += 1
            counts[reason] += 1
    assert counts["refused"] == REQUESTS // 20
    assert counts["left"] > REQUESTS // 20
    assert counts["answered"] > REQUESTS // 2
    assert min(counts["stop"], counts["length"]) > REQUESTS // 20
    # every page is back, and nobody is remembered
    of = client.batcher.engine
    assert sorted(of.free) == list(range(PAGES))
    assert not any(of.users)
    assert not of.known
    assert health["steps"] < sum(len(expected.tokens_of(body)) + 6 for body in bodies) // 4


def long_prompt(engine: ModuleType, most: int) -> list[int]:
    """Return a prompt whose answer has that many tokens."""
    prompts = ([8 + i] for i in range(50))
    answers = ((p, engine.without_cache(engine.Decoder(), p, most)) for p in prompts)
    return next(prompt for prompt, answer in answers if len(answer) == most)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_ends_when_its_client_goes(stream, serve, client, monkeypatch):
    most = 60
    prompt = long_prompt(serve.engine, most)
    step = client.batcher.engine.step
    # slow enough for a client to go meanwhile
    monkeypatch.setattr(client.batcher.engine, "step", lambda: (time.sleep(0.05), step())[1])
    body = {"prompt": prompt, "max_tokens": most, "stream": stream, "temperature": 0}

    async def leave() -> Any:
        async with openai.AsyncOpenAI(**client.options) as asking:
            return await ask(asking, body, 2)

    assert asyncio.run(leave()) == "left"
    assert wait_until_idle(client)["steps"] < most // 2


def test_a_stop_string_ends_the_request(serve, client):
    most = 60
    prompt = long_prompt(serve.engine, most)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": most, "temperature": 0}
    text = client.openai.completions.create(**body).choices[0].text
    at = next(i for i in range(8, 40) if text.index(text[i : i + 3]) == i)
    before = wait_until_idle(client)["steps"]
    # the last letter of the first looks as if it went on, and the second never comes
    stops = [text[at : at + 3], text[at - 3 : at] + "\N{REPLACEMENT CHARACTER}"]
    pieces = client.openai.completions.create(**body, stop=stops, stream=True)
    choices = [piece.choices[0] for piece in pieces]
    assert "".join(choice.text for choice in choices) == text[:at]
    assert choices[-1].finish_reason == "stop"
    # no step was made for it afterwards
    assert wait_until_idle(client)["steps"] == before + at + 3


def test_streams_have_the_form_of_the_api(client):
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0, "stream": True}
    chat = {**body, "messages": [{"role": "user", "content": "Hello"}]}
    for path, asking in (
        ("/chat/completions", chat),
        ("/completions", {**body, "prompt": "Hello"}),
    ):
        reply = client.http.post(f"/v1{path}", json=asking)
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert len({piece["id"] for piece in pieces}) == 1
        assert not any("usage" in piece for piece in pieces)
        reasons = [piece["choices"][0]["finish_reason"] for piece in pieces]
        assert reasons == [None, None, "length"]
        if asking is chat:
            roles = [piece["choices"][0]["delta"].get("role") for piece in pieces]
            assert roles == ["assistant", None, None]


def test_answers_are_drawn_by_their_seed(client):
    def said(**options: Any) -> str:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, **options}
        return client.openai.completions.create(**body).choices[0].text

    assert said(seed=1) == said(seed=1, temperature=1, top_p=1)
    assert len({said(seed=seed) for seed in range(5)}) > 1
    # without a seed answers differ, and the likeliest token is always the same
    assert len({said() for _ in range(5)}) > 1
    assert len({said(temperature=0), said(top_p=0), said(temperature=0, top_p=0.5)}) == 1


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8), (2.0, 0.6)])
def test_tokens_are_drawn_as_often_as_they_are_likely(serve, temperature, top_p):
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, 1.5])
    draw = serve.sampler(temperature, top_p, 3)
    found = torch.tensor([draw(logits) for _ in range(4000)]).bincount(minlength=5) / 4000
    likely = (logits / temperature).softmax(0)
    order = sorted(range(5), key=lambda token: -likely[token])
    kept = next(n for n in range(1, 6) if n == 5 or likely[order[:n]].sum() >= top_p)
    likely[order[kept:]] = 0
    torch.testing.assert_close(found, likely / likely.sum(), rtol=0, atol=0.03)
    assert not found[order[kept:]].any()


def test_text_comes_as_soon_as_it_is_certain(serve):
    """For tokens of bytes, of which several make a letter, and any stop strings."""
    rng = random.Random(2)

    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    for _ in range(400):
        text = "".join(rng.choice("abé€😀") for _ in range(rng.randint(1, 12)))
        stops = ["".join(rng.choice("abé") for _ in range(rng.randint(1, 3))) for _ in range(2)]
        stops = stops[: rng.randint(0, 2)]
        ends = (text[:n] for n in range(len(text) + 1))
        whole = next((t for t in ends if any(stop in t for stop in stops)), None)
        expected = text if whole is None else whole[: min(whole.find(s) % 99 for s in stops)]
        writer, pieces, stopped = serve.Writer(decode, stops), [], False
        tokens = list(text.encode())
        for number, token in enumerate(tokens, 1):
            writer.write(token)
            is_last = number == len(tokens)
            piece, stopped = writer.rest() if is_last else writer.certain()
            pieces.append(piece)
            if stopped:
                break
            said = decode(tokens[:number]).rstrip("\N{REPLACEMENT CHARACTER}")
            held = said[len("".join(pieces)) :]
            assert is_last or not held or any(stop.startswith(held) for stop in stops)
        assert "".join(pieces) == expected
        assert stopped == (whole is not None)


REFUSED = [
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": ""}, "prompt", "at least one token is needed, got none"),
    ({"prompt": [8, True]}, "prompt", "valid integer"),
    ({"prompt": ["a", "b"]}, "prompt", "valid string or"),
    ({"prompt": [101]}, "prompt", "tokens are from 0 to 100, got 101"),
    ({"prompt": None}, "prompt", "got 'None'"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, got '0'"),
    ({"max_tokens": 2.0}, "max_tokens", "valid integer"),
    ({"stream": 1}, "stream", "valid boolean, got '1'"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"temperature": float("nan")}, "temperature", "or equal to 2, got 'nan'"),
    ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
    ({"n": 2}, "n", "Input should be 1, got '2'"),
    ({"best_of": 2}, "best_of", "Input should be 1"),
    ({"logprobs": 1}, "logprobs", "Input should be None"),
    ({"presence_penalty": 0.5}, "presence_penalty", "Input should be 0"),
    ({"stop": ["a"] * 5}, "stop", "at most 4 items"),
    ({"guided_json": {}}, "guided_json", "Extra inputs are not permitted"),
    ({"stream_options": {"include_usage": True}}, None, "for stream=true alone"),
]


@pytest.mark.parametrize(("change", "param", "what"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(change, param, what, client):
    body = {"model": "tiny", "prompt": [8, 9], "max_tokens": 2, **change}
    reply = client.http.post("/v1/completions", content=json.dumps(body))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert what in error["message"]
    assert error["message"].startswith(param or "")
    assert wait_until_idle(client)["steps"] == 0


def test_messages_of_other_kinds_are_refused(client):
    for message in (
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "image_url"}]},
    ):
        with pytest.raises(openai.BadRequestError, match="messages: "):
            client.openai.chat.completions.create(model="tiny", messages=[message])
    both = {"max_tokens": 1, "max_completion_tokens": 1}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    with pytest.raises(openai.BadRequestError, match="give one of them"):
        client.openai.chat.completions.create(model="tiny", messages=messages, **both)
    # without a limit an answer may fill the cache
    reply = client.openai.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert reply.usage.prompt_tokens == len("user: Hello\nassistant: ")
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_models_are_told_and_others_refused(client):
    assert [model.id for model in client.openai.models.list()] == ["tiny"]
    assert client.openai.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="'tiny' is served here, got 'large'") as caught:
        client.openai.models.retrieve("large")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="'tiny' is served here"):
        client.openai.completions.create(model="large", prompt="Hello")
    assert client.http.post("/v1/completions", content=b"{").status_code == 400
    assert client.http.get("/v1/completions").json()["error"]["message"] == "Method Not Allowed"
    assert client.http.get("/nothing").json()["error"]["type"] == "invalid_request_error"


def test_what_has_no_room_is_refused(serve, client, monkeypatch):
    # the longest that there is room for, and one token more
    longest = {"model": "tiny", "prompt": [8] * (PAGES * serve.engine.PAGE)}
    reply = client.openai.completions.create(**longest, max_tokens=1)
    assert reply.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError, match="113 tokens, got 112 and 2") as caught:
        client.openai.completions.create(**longest, max_tokens=2)
    assert caught.value.code == "context_length_exceeded"
    monkeypatch.setattr(client.batcher, "max_waiting", 0)
    with pytest.raises(openai.InternalServerError, match="0 requests are waiting already"):
        client.openai.completions.create(model="tiny", prompt="Hello")
    wait_until_idle(client)


def test_everybody_is_told_where_a_step_fails(client, monkeypatch):
    def fail() -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(client.batcher.engine, "step", fail)
    body = {"model": "tiny", "prompt": [8, 9], "max_tokens": 2}
    with pytest.raises(openai.APIError, match="the engine has failed: no more memory"):
        list(client.openai.completions.create(**body, stream=True))
    with pytest.raises(openai.InternalServerError, match="the engine has failed: no more memory"):
        client.openai.completions.create(**body)
    assert client.http.get("/health").status_code == 500


SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 0,
}


def saved(path: Path, config: Any) -> str:
    """Write a model of random weights, and a tokenizer of bytes with a template."""
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**{letter: i for i, letter in enumerate(letters)}, "<end>": 256}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)


def test_a_model_of_transformers_says_what_it_says(serve, tmp_path):
    """Layers with a window, layers without, and sinks."""
    kinds = ["sliding_attention", "full_attention"]
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    scaling = {"rope_type": "default", "rope_theta": 10_000.0}
    config = transformers.GptOssConfig(
        **SIZES, **experts, sliding_window=6, layer_types=kinds, rope_parameters=scaling
    )
    path = saved(tmp_path, config)
    model = importlib.import_module("serving.pretrained").Pretrained(path, "cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    app = serve.make_app(20, model=model, name="random", page=4, tokens=9, sequences=3)
    with asked(app) as client:
        for text in ("Hello", "Grüße, 😀", "a longer prompt, of several chunks"):
            messages = [{"role": "user", "content": text}]
            body = {"model": "random", "messages": messages, "max_completion_tokens": 9}
            pieces = client.openai.chat.completions.create(**body, temperature=0, stream=True)
            said = "".join(piece.choices[0].delta.content for piece in pieces)
            prompt = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
            ids = prompt["input_ids"]
            whole = theirs.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
            assert said == tokenizer.decode(whole, skip_special_tokens=True)
        wait_until_idle(client)
    assert client.batcher.room == 20 * 4 + 1


def test_a_model_with_layers_of_another_kind_is_refused(serve, tmp_path):
    config = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
    path = saved(tmp_path, config)
    with pytest.raises(NotImplementedError, match="only 1 of 2 layers attend to keys"):
        importlib.import_module("serving.pretrained").Pretrained(path, "cpu")


def test_the_page_about_it_runs(client, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_BASE_URL", client.options["base_url"])
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    page = (ROOT / "docs" / "serving.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 1
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out
    wait_until_idle(client)


@pytest.mark.parametrize("library", ["pydantic", "starlette", "uvicorn"])
def test_a_missing_library_is_named_in_one_line(library):
    script = str(EXAMPLES / "serve.py")
    code = f"import runpy, sys; sys.modules[{library!r}] = None; runpy.run_path({script!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith(f"serve.py needs {library}")
    assert "pip install pydantic starlette uvicorn" in found.stderr
