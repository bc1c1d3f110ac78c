"""Tokens to text: an alphabet for the model of ``engine.py``, sampling, and stop strings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# the token that ends a sequence, 7, has no letter; what has none either becomes the first
ALPHABET = "\N{REPLACEMENT CHARACTER}\n\t}~éü\0" + "".join(map(chr, range(32, 125)))


class Letters:
    """A tokenizer with a letter for each token of ``engine.py``'s model, which has no name."""

    vocabulary = len(ALPHABET)
    ends = frozenset({ALPHABET.index("\0")})

    def encode(self, text: str) -> list[int]:
        return [max(0, ALPHABET.find(letter)) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(ALPHABET[token] for token in tokens if token not in self.ends)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of messages, and of the beginning of the answer."""
        said = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(said) + "assistant: ")


def sampler(temperature: float, top_p: float, seed: int | None) -> Callable[[Tensor], int]:
    """Return a function that draws a token by its logits."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed % 2**64)

    def draw(logits: Tensor) -> int:
        logits = logits.cpu().double()
        if temperature == 0:
            return int(logits.argmax())
        likely, tokens = (logits / temperature).softmax(0).sort(descending=True, stable=True)
        # the fewest tokens that have top_p together
        kept = likely.cumsum(0) - likely < top_p
        kept[0] = True
        return int(tokens[(likely * kept).multinomial(1, generator=generator)])

    return draw


class Writer:
    """The text of an answer, piece by piece: what no later token and no stop string can change."""

    def __init__(self, decode: Callable[[list[int]], str], stops: list[str]) -> None:
        self.decode, self.stops = decode, stops
        self.tokens: list[int] = []
        # tokens up to ``read`` are in the text; those from ``begun`` tell how the next ones look
        self.begun = self.read = 0
        self.held = ""

    def write(self, token: int) -> None:
        """Take a token; its text may have to wait for the next ones, as bytes of a letter do."""
        self.tokens.append(token)
        text = self._text()
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._take(text)

    def certain(self) -> tuple[str, bool]:
        """Return the text that is certain, and whether a stop string ended it."""
        found = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            return self.held[: min(found)], True
        ends = range(len(self.held) + 1)
        keep = next(i for i in ends if any(x.startswith(self.held[i:]) for x in [*self.stops, ""]))
        text, self.held = self.held[:keep], self.held[keep:]
        return text, False

    def rest(self) -> tuple[str, bool]:
        """Return all text that is left, as after the last token."""
        self._take(self._text())
        text, stopped = self.certain()
        return (text, True) if stopped else (text + self.held, False)

    def _text(self) -> str:
        """Return the text of the tokens that are not in the text yet."""
        before = self.decode(self.tokens[self.begun : self.read])
        return self.decode(self.tokens[self.begun :])[len(before) :]

    def _take(self, text: str) -> None:
        self.held += text
        self.begun, self.read = self.read, len(self.tokens)
