"""OpenAI's forms: what is asked, how an answer and its pieces look, and errors.

A field that stands here with a single value is one that clients send and that has no other value
here, ``n`` for instance. Any other field is refused by its name.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Count = Annotated[int, Field(ge=1)]
Nothing = Literal[None]


class RefusedError(Exception):
    """A refused request: its HTTP status, and what OpenAI's clients expect of an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Form):
    include_usage: bool = False


class Asked(Form):
    """What both ways of asking have in common; temperature and top_p are 1 unless given."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    max_tokens: Count | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Nothing = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @model_validator(mode="after")
    def _check(self) -> Asked:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is for stream=true alone")
        return self


class Completion(Asked):
    """A prompt, as text or as tokens, to be continued."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Nothing = None
    suffix: Nothing = None


class Part(Form):
    type: Literal["text"]
    text: str


class Message(Form):
    role: Literal["system", "user", "assistant"]
    content: str | list[Part]

    @property
    def plain(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class Chat(Asked):
    """Messages to be answered."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_most(self) -> Chat:
        if self.max_tokens and self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are one: give one of them")
        return self


def refusal_of(error: ValidationError) -> RefusedError:
    """Return what pydantic found as an error of OpenAI's form, which names one parameter."""
    first = error.errors()[0]
    place = first["loc"][:1]
    # each member of a union has a message of its own
    said = list(dict.fromkeys(e["msg"] for e in error.errors() if e["loc"][:1] == place))
    what = first["msg"] if first["type"] == "value_error" else " or: ".join(said)
    if not place:
        return RefusedError(400, what)
    got = "" if first["type"] == "missing" else f", got {str(first['input'])[:80]!r}"
    return RefusedError(400, f"{place[0]}: {what}{got}", f"{place[0]}")


class Reply:
    """The forms of one answer."""

    def __init__(self, asked: Asked, prompt_tokens: int) -> None:
        self.is_chat = isinstance(asked, Chat)
        self.has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self.prompt_tokens = prompt_tokens
        self.head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": asked.model,
        }

    def usage(self, tokens: int) -> dict[str, int]:
        total = self.prompt_tokens + tokens
        names = "prompt_tokens", "completion_tokens", "total_tokens"
        return dict(zip(names, (self.prompt_tokens, tokens, total), strict=True))

    def whole(self, text: str, reason: str, tokens: int) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.is_chat else None
        choice = {"index": 0, **(said or {"text": text}), "logprobs": None, "finish_reason": reason}
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": [choice], "usage": self.usage(tokens)}

    def piece(self, text: str, reason: str | None = None, *, is_first: bool = False) -> Any:
        role = {"role": "assistant"} if is_first else {}
        said = {"delta": {**role, "content": text}} if self.is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self.has_usage else {}
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": [choice], **usage}

    def last(self, tokens: int) -> dict[str, Any]:
        """Return the piece that tells the usage, which has no text."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": [], "usage": self.usage(tokens)}
