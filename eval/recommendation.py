"""What was tried to find a recipe, and which is recommended, out of the record of the search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from symprune.eval.tables import size
from symprune.eval.verdict import change
from symprune.wording import in_brackets

NARROW = 60  # columns below which a table becomes lists


def show(record: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """Every try, smallest first, for a terminal of that width."""
    title = (
        f"{record['model']}: perplexity on {record['data']} ({record['windows']} x "
        f"{record['seqlen']} tokens), dense {record['dense']:.2f}, {size(record['dense_bytes'])}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("recipe", "size when packed", "perplexity", "seconds"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    lines = [Text(title, style="bold")]
    for each in sorted(record["tried"], key=lambda result: result["bytes"]):
        share = each["bytes"] / record["dense_bytes"]
        takes = f"{size(each['bytes'])}, {100 * share:.0f} %"
        found = each["perplexity"]
        worse = f"{found:.2f}{in_brackets(record['dense'], found)}"
        best = "bold" if each == record["recommended"] else ""
        table.add_row(Text(each["choice"]), takes, worse, f"{each['seconds']:.0f}", style=best)
        lines.append(Text(f"{each['choice']}\n  {takes}; perplexity {worse}", style=best))
    yield from lines if width < NARROW else [table]


def verdict(record: Mapping[str, Any]) -> str:
    """One sentence: what is recommended, and what it comes to."""
    wished = (
        f"{100 * record['size']:g} % of the size"
        if record["size"] is not None
        else f"a perplexity at most {100 * record['loss']:g} % higher"
    )
    found = record["recommended"]
    if found is None:
        least = min(record["tried"], key=lambda each: each["perplexity"])
        return (
            f"Nothing that was tried reaches {wished}; {least['choice']} comes nearest, with "
            f"perplexity {change(record['dense'], least['perplexity'])}."
        )
    share = 100 * found["bytes"] / record["dense_bytes"]
    return (
        f"For {wished}: {found['choice']}, perplexity "
        f"{change(record['dense'], found['perplexity'])}, {share:.0f} % of the size when packed."
    )


def steps(record: Mapping[str, Any]) -> list[str]:
    """The commands that do it; where values stay as they are, packing is one of them."""
    found = record["recommended"]
    if found is None:
        return []
    packed = found["values"] is not None
    return [found["command"], *([] if packed else ["symprune pack DIR PACKED"])]
