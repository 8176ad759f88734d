"""Documents out of rows: a text column, or conversations that the tokenizer's chat template writes.

A source of documents is read as one long text, as everything is. A large one is too long to be
tokenised as a whole: then documents are drawn at random until there is plenty.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from symprune.errors import SympruneError

CHAT_COLUMNS = ("messages", "conversations")
TEXT_COLUMNS = ("text", "content")
PLENTY = 32  # characters for each token that is asked for: some eight times what they take
LEAST = 4_000_000  # characters, which are tokenised in about a second
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}
BETWEEN = "\n\n"


class Tokenizer(Protocol):
    """What is asked of a tokenizer: text in, `input_ids` out."""

    def __call__(self, text: str, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Conversation:
    """Messages, as chat templates take them, and which column they stood in."""

    messages: tuple[dict[str, str], ...]
    column: str = field(compare=False)

    def __len__(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


Document = str | Conversation


def choose_column(columns: Sequence[str], wanted: str | None, source: str) -> str:
    """The column documents are in: the one asked for, else conversations, else text, else the only
    one there is."""
    if wanted is not None:
        if wanted not in columns:
            raise SympruneError(f"{source} has no column {wanted!r}; it has {_list(columns)}.")
        return wanted
    for name in (*CHAT_COLUMNS, *TEXT_COLUMNS):
        if name in columns:
            return name
    if len(columns) == 1:
        return columns[0]
    raise SympruneError(
        f"{source} has none of the columns {', '.join((*CHAT_COLUMNS, *TEXT_COLUMNS))} but "
        f"{_list(columns)}; name one behind a colon."
    )


def _list(columns: Sequence[str]) -> str:
    shown = ", ".join(str(name)[:40] for name in columns[:12])
    return (shown or "none") + (", ..." if len(columns) > 12 else "")


def read_cell(value: Any, column: str, where: str) -> Document | None:
    """The document in one cell: text, or a conversation. None where there is nothing in it."""
    if value is None:
        return None
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, list):
        messages = tuple(_read_message(entry, column, where) for entry in value)
        return Conversation(messages, column) if messages else None
    raise SympruneError(f"Column {column!r} of {where} is neither text nor a conversation.")


def _read_message(entry: Any, column: str, where: str) -> dict[str, str]:
    """A message as `{"role", "content"}` or as ShareGPT's `{"from", "value"}`."""
    if isinstance(entry, dict):
        role, content = entry.get("role"), entry.get("content")
        if role is None and content is None:
            role, content = entry.get("from"), entry.get("value")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": ROLES.get(role, role), "content": content}
    raise SympruneError(
        f"Column {column!r} of {where} is not a list of messages with a role and a content."
    )


def draw(documents: Sequence[Document], tokens: int, seed: int) -> list[Document]:
    """Documents in their order if they are few; else as many, at random, as have plenty of text
    for `tokens` tokens."""
    enough = max(LEAST, PLENTY * tokens)
    if sum(len(document) for document in documents) <= enough:
        return list(documents)
    chosen: list[Document] = []
    size = 0
    for index in random.Random(seed).sample(range(len(documents)), len(documents)):
        if size >= enough:
            break
        chosen.append(documents[index])
        size += len(documents[index])
    return chosen


def join(documents: Sequence[Document], tokenizer: Any, source: str) -> str:
    """One text: an empty line between documents, conversations as the tokenizer's template writes
    them. Those that the template refuses are left out, if they are fewer than half."""
    found, refused, told = [], 0, ""
    for document in documents:
        if isinstance(document, str):
            found.append(document + BETWEEN)
            continue
        try:
            found.append(_write_chat(document, tokenizer, source))
        except _Refused as error:
            refused, told = refused + 1, str(error)
    if 2 * refused > len(documents):
        raise SympruneError(
            f"The tokenizer's chat template refuses {refused} of {len(documents)} conversations of "
            f"{source}: {told}"
        )
    return "".join(found)


class _Refused(Exception):
    """A conversation does not fit the chat template."""


def _write_chat(conversation: Conversation, tokenizer: Any, source: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise SympruneError(
            f"Column {conversation.column!r} of {source} holds conversations, and the model's "
            "tokenizer has no chat template to write them with; name a column of text, or take "
            "the instruction-tuned model."
        )
    try:
        written = tokenizer.apply_chat_template(list(conversation.messages), tokenize=False)
    except Exception as error:  # a template raises whatever it likes
        said = str(error).strip().partition("\n")[0]
        raise _Refused(said or type(error).__name__) from error
    return str(written)


def first_of(documents: Iterator[Document], most: int) -> list[Document]:
    """The first documents, up to so many characters."""
    found: list[Document] = []
    size = 0
    for document in documents:
        found.append(document)
        size += len(document)
        if size >= most:
            break
    return found
