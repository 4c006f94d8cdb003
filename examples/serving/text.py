"""Between text and tokens: a tokenizer of bytes, text as it grows token by token, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

UNFINISHED = 3  # bytes at most of a character that lacks its last; decoders write one U+FFFD for all or for each


class Tokenizer(Protocol):
    """What serving needs of one; those of `transformers` have it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any: ...


class ByteTokenizer:
    """A token is a byte of UTF-8. For models of bytes, and those that are there to be tried."""

    def encode(self, text: str) -> list[int]:
        """As many tokens as `text` has bytes."""
        return list(text.encode())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """What is no UTF-8 becomes U+FFFD; tokens from 256 on are no text."""
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


class GrowingText:
    """The text of tokens as they come, up to the first of `stops`, which is not part of it.

    What may still become another character or a stop is held back until it is decided.

    Args:
        stops: none of them empty.

    Example::

        text = GrowingText(ByteTokenizer(), ["END"])
        "".join(text.push(token) for token in b"the EN")  # "the "
        text.finish()                                     # "EN": no token came that made it a stop
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.stopped = False
        self._tokens: list[int] = []
        self._context = 0  # where decoding starts: some tokenizers write a word's space by the word before
        self._whole = 0  # tokens up to the last after which no character was unfinished
        self._shown = 0  # characters that are out, of the text from `_context` on
        self._held = ""  # of what is out, the end that may begin a stop

    def push(self, token: int) -> str:
        """The text that is decided now."""
        self._tokens.append(token)
        text = self._decoded(self._context)
        unfinished = min(UNFINISHED, len(text) - len(text.rstrip("\ufffd")))
        decided = max(self._shown, len(text) - unfinished)
        new, self._shown = text[self._shown : decided], decided
        if not unfinished:
            self._context, self._whole = self._whole, len(self._tokens)
            self._shown = len(self._decoded(self._context))
        return self._up_to_a_stop(new)

    def finish(self) -> str:
        """The rest, no more tokens being to come."""
        if self.stopped:
            return ""
        rest = self._up_to_a_stop(self._decoded(self._context)[self._shown :])
        held, self._held = self._held, ""
        return rest + held

    def _decoded(self, start: int) -> str:
        return self.tokenizer.decode(self._tokens[start:], skip_special_tokens=True)

    def _up_to_a_stop(self, new: str) -> str:
        text = self._held + new
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
