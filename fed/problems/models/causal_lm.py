"""A causal language model as a loss: the mean negative log likelihood of a client's tokens.

A row is a window of tokens, its target how many of them are text and not padding at its end. The
loss of a row is summed over its predicted tokens and divided by those of a full window, so windows
weigh as much as they have text; of full windows the mean is the model's own loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from symprune.errors import SympruneError
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.models.module_loss import ModuleLoss, Parameters
from symprune.token_loss import check_vocabulary

LANGUAGE = "language"
ROWS_AT_ONCE = 4


@dataclass(frozen=True)
class CausalLM(ModuleLoss):
    """`model` is a HuggingFace causal language model, or any module that takes `input_ids` and
    `attention_mask` and answers with `logits`."""

    model: nn.Module
    exempt: tuple[str, ...] = ()  # patterns of names that are not trained
    rows_at_once: int = ROWS_AT_ONCE
    task = LANGUAGE
    module: nn.Module = field(init=False, compare=False, repr=False)
    layout: FlatLayout = field(init=False, compare=False, repr=False)
    fixed: Parameters = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.rows_at_once < 1:
            raise SympruneError(f"rows_at_once must be above 0, not {self.rows_at_once}.")
        self.adopt(self.model, self.exempt)

    def __repr__(self) -> str:
        return f"CausalLM({type(self.model).__name__}, {self.digest})"

    def initial(self, seed: int) -> Tensor:
        """The model's own weights, whatever the seed."""
        return self.own_start()

    def outputs(self, parameters: Parameters, x: Tensor, **inputs: Any) -> Tensor:
        """Logits `[m, length, vocabulary]`."""
        asked = {"input_ids": x, "use_cache": False, **inputs}
        logits: Tensor = functional_call(self.module, parameters, (), asked).logits
        return logits

    def row_losses(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        length = x.shape[1]
        text = torch.arange(length, device=x.device) < y.unsqueeze(1)
        logits = self.outputs(parameters, x, attention_mask=text.long())[:, :-1].float()
        wanted = x[:, 1:].masked_fill(~text[:, 1:], -100)  # what cross entropy leaves out
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return losses.view(wanted.shape).sum(1) / (length - 1)

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        raise SympruneError("A language model has no labels to predict; it has a perplexity.")

    def check_tokens(self, x: Tensor) -> None:
        embeddings = getattr(self.module, "get_input_embeddings", lambda: None)()
        if embeddings is not None:
            check_vocabulary(x, embeddings.weight)


def token_weights(weights: Tensor, y: Tensor, length: int) -> Tensor:
    """Row weights `[C, m]` scaled, client by client, to a mean over tokens: so much as if all its
    text were in full windows."""
    rows, tokens = (weights != 0).sum(1, keepdim=True), (y - 1).clamp_min(0).sum(1, keepdim=True)
    return weights * (rows * (length - 1) / tokens).to(weights.dtype)


Text = str | Sequence[str] | Tensor | Sequence[Tensor]


def cut_windows(text: Text, length: int, tokenizer: Any = None) -> tuple[Tensor, Tensor]:
    """One owner's text as windows `[m, length]`, padded at their ends, and the tokens of each. A
    string or a vector of tokens is one document, a list has several, a matrix is windows already.
    What remains of a document is a window if it has two tokens, the least to predict one."""
    if length < 2:
        raise SympruneError(f"A window has two tokens at least, not {length}.")
    documents: list[Any] = [text] if isinstance(text, str | Tensor) else list(text)
    windows: list[Tensor] = []
    for document in documents:
        tokens = _tokens(document, tokenizer)
        if tokens.dim() == 2 and tokens.shape[1] > length:
            raise SympruneError(
                f"Windows of {tokens.shape[1]} tokens are longer than length = {length}."
            )
        pieces = tokens.split(length) if tokens.dim() == 1 else tuple(tokens)
        windows += [piece for piece in pieces if len(piece) > 1]
    if not windows:
        raise SympruneError("A text has no window of two tokens or more.")
    sizes = torch.tensor([len(window) for window in windows])
    rows = torch.zeros(len(windows), length, dtype=torch.int64)
    for row, window in zip(rows, windows, strict=True):
        row[: len(window)] = window
    return rows, sizes


def _tokens(document: str | Tensor, tokenizer: Any) -> Tensor:
    if isinstance(document, Tensor):
        whole = not (document.is_floating_point() or document.is_complex())
        if not whole or document.dtype == torch.bool or document.dim() not in (1, 2):
            raise SympruneError(
                "Tokens are whole numbers in a vector or, cut already, in rows; these are "
                f"{document.dtype} of shape {tuple(document.shape)}."
            )
        return document.cpu().long()
    if not isinstance(document, str):
        raise SympruneError(f"A text is a string or tokens, not a {type(document).__name__}.")
    if tokenizer is None:
        raise SympruneError("Text needs a tokenizer: pass tokenizer=..., or tokens.")
    return torch.tensor(tokenizer(document)["input_ids"], dtype=torch.int64)
