"""Pages of the documentation site that are not files of docs/: `make docs` calls these hooks.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages, and every room of the code gets an API
page made from its docstrings. The first API pages have what `import symprune` and `symprune.fed`
offer.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
COPIED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PACKAGES = {"symprune": "symprune", "fed": "symprune.fed", "eval": "symprune.eval"}
LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:|#)[^)]+)\)")


def on_config(config: Any) -> Any:
    """The API section of the navigation: what is public, then the rooms."""
    rooms = {name: page for name, (page, _) in api_pages().items()}
    for section in config["nav"]:
        if "API" in section:
            section["API"] = [{name: page} for name, page in rooms.items()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    for source, page in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relink(text, ROOT)))
    for page, text in api_pages().values():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of pages in docs/ to files outside it."""
    path = page.file.abs_src_path
    return relink(markdown, Path(path).parent) if path else markdown


def relink(text: str, folder: Path) -> str:
    """`text`, as if it stood where the site has it: links to pages go there, links to other files
    of the repository become their names."""

    def replace(link: re.Match[str]) -> str:
        words, target = link.groups()
        path, _, anchor = target.partition("#")
        whole = (folder / path).resolve()
        if not whole.is_relative_to(ROOT):
            return link.group()
        source = str(whole.relative_to(ROOT))
        if source in COPIED:
            here = "../" * (len(folder.relative_to(ROOT).parts) - 1)
            page = f"{here if folder != ROOT else ''}{COPIED[source]}"
        elif source.startswith("docs/"):
            page = source.removeprefix("docs/") if folder == ROOT else path
        else:
            return f"`{source}`" if words.strip("`") == source else f"{words} (`{source}`)"
        return f"[{words}]({page}{'#' + anchor if anchor else ''})"

    return LINK.sub(replace, text)


def api_pages() -> dict[str, tuple[str, str]]:
    """title -> (page, Markdown), in the order of the navigation."""
    pages = {
        "symprune": ("api/index.md", public_page("symprune")),
        "symprune.fed": ("api/fed.md", public_page("symprune.fed")),
    }
    for top, package in PACKAGES.items():
        for folder in [ROOT / top, *sorted(p for p in (ROOT / top).rglob("*") if p.is_dir())]:
            if not (folder / "__init__.py").exists():
                continue
            inner = folder.relative_to(ROOT / top).parts
            name = ".".join((package, *inner))
            title = f"{name}, its files" if name in pages else name
            pages[title] = (f"api/{name}.md", room_page(folder, name))
    return pages


def room_page(folder: Path, name: str) -> str:
    """Every module of a room, from its docstrings."""
    modules = [path.stem for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
    described = (folder / "__init__.py").read_text(encoding="utf-8").strip()
    directives = [f"::: {name}\n    options: {{members: false}}"] if described else []
    directives += [f"::: {name}.{module}" for module in modules]
    return "\n\n".join([f"# {name}", *directives]) + "\n"


def public_page(package: str) -> str:
    """What `import symprune` or `import symprune.fed` offers, wherever it is defined."""
    module = import_module(package)
    parts = [f"# {package}", f"What `import {package}` offers. Everything else is in the rooms."]
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, type | FunctionType) and thing.__module__.startswith("symprune"):
            place = f"{thing.__module__}.{thing.__qualname__}"
            parts.append(f"::: {place}\n    options: {{heading: {package}.{name}}}")
    return "\n\n".join(parts) + "\n"
