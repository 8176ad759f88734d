"""A prompt continued: the likeliest tokens, or drawn ones that a seed brings back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from symprune.errors import SympruneError
from symprune.jobs.generate import Loaded, Request, continue_prompt, load

PROMPT = "lambda if while"


def loaded(folder: Path, request: Request) -> Loaded:
    return load(str(folder), request)


def test_the_likeliest_tokens_come_and_are_written_as_they_come(tiny_folder: Path) -> None:
    request = Request(PROMPT, max_new_tokens=12)
    found = loaded(tiny_folder, request)
    pieces: list[str] = []
    came = continue_prompt(found, request, pieces.append)
    row = torch.tensor([found.ids])
    all_of_it = found.model.generate(row, max_new_tokens=12, do_sample=False)
    told = found.tokenizer.decode(all_of_it[0, row.shape[1] :], skip_special_tokens=True)
    assert came.text == "".join(pieces) == told
    assert came.tokens == all_of_it.shape[1] - row.shape[1]
    assert continue_prompt(found, request).text == came.text


def test_what_is_drawn_depends_on_the_seed_alone(tiny_folder: Path) -> None:
    def drawn(seed: int) -> str:
        request = Request(PROMPT, max_new_tokens=16, temperature=1.0, seed=seed)
        found = loaded(tiny_folder, request)
        torch.rand(3)
        return continue_prompt(found, request).text

    assert drawn(5) == drawn(5) != drawn(6)


def test_the_makers_settings_do_not_narrow_what_is_drawn(tiny_folder: Path) -> None:
    request = Request(PROMPT, max_new_tokens=16, temperature=1.0, seed=5)
    found = loaded(tiny_folder, request)
    free = continue_prompt(found, request).text
    found.model.generation_config.update(do_sample=True, top_k=1, top_p=0.1, temperature=0.1)
    assert continue_prompt(found, request).text == free


def test_speed_is_told_by_the_clock(tiny_folder: Path) -> None:
    request = Request(PROMPT, max_new_tokens=5)
    found = loaded(tiny_folder, request)
    found.model.generation_config.eos_token_id = None
    times = iter([10.0, 12.0, 12.5, 13.0, 13.5, 14.0])
    came = continue_prompt(found, request, clock=lambda: next(times))
    assert (came.tokens, came.first_token_seconds, came.tokens_per_second) == (5, 2.0, 2.0)
    one = Request(PROMPT, max_new_tokens=1)
    assert continue_prompt(found, one).tokens_per_second is None


def test_a_chat_is_put_as_the_template_has_it(tiny_folder: Path) -> None:
    request = Request("while", max_new_tokens=2, chat=True)
    with pytest.raises(SympruneError, match="has no chat template; leave --chat out"):
        loaded(tiny_folder, request)
    tokenizer = loaded(tiny_folder, Request("while", 2)).tokenizer
    template = "{% for m in messages %}if {{ m.content }} {% endfor %}lambda"
    tokenizer.chat_template = template
    from symprune.jobs.generate import encode

    assert encode(tokenizer, request, "x") == tokenizer("if while lambda")["input_ids"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": " \n"}, "prompt is empty"),
        ({"max_new_tokens": 0}, "must be 1 or more, not 0"),
        ({"temperature": -1.0}, "must be 0 or from 0.001 to 1000, not -1"),
        ({"temperature": float("nan")}, "must be 0 or from 0.001 to 1000, not nan"),
        ({"temperature": 1e-300}, "must be 0 or from 0.001 to 1000, not 1e-300"),
        ({"max_new_tokens": 64}, "room for 64 tokens"),
        ({"prompt": "while " * 99}, "room for 64 tokens"),
        ({"device": "gpu0"}, "Device 'gpu0'"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    changes: dict[str, Any], said: str, tiny_folder: Path
) -> None:
    with pytest.raises(SympruneError, match=said):
        loaded(tiny_folder, Request(**{"prompt": PROMPT, **changes}))
