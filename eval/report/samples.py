"""The same prompts continued by several models, as a section of a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from symprune.eval import samples
from symprune.eval.report import page
from symprune.eval.samples import Sample, Written


def sections(record: Mapping[str, Any]) -> list[str]:
    """The section with a record's samples; none where it has none."""
    found = samples.read(record)
    if not found:
        return []
    note = page.paragraph("Always the likeliest token, so a model's text is the same every time.")
    return [page.section("The same prompts, continued", note, *map(_figure, found))]


def _figure(sample: Sample) -> str:
    """A prompt above what each model made of it."""
    texts = "".join(
        _written(each, bool(number)) for number, each in enumerate(sample.continuations)
    )
    return (
        f"<figure>\n<figcaption>{escape(samples.tidy(sample.prompt))}</figcaption>\n"
        f'<dl class="samples">{texts}</dl>\n</figure>'
    )


def _written(written: Written, is_other: bool) -> str:
    told = is_other and written.same
    remark = f"<small>{escape(samples.agreement(written))}</small>" if told else ""
    text = escape(samples.tidy(written.text).lstrip() or "(nothing)")
    return f"<div><dt>{escape(written.by)}{remark}</dt><dd>{text}</dd></div>"
