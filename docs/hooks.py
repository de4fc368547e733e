"""What MkDocs does beyond Markdown: pages from outside `docs/`, links that work on GitHub and on the site, and tables
of settings that are filled from the code. Run as a script, it writes the tables of `docs/objectives.md` and of
`docs/overrides.md`.

Guarantees: a link works on GitHub and on the site; a table of settings on the site is what the installed library says.
"""

import base64
import dataclasses
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a test imports this module without MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES_FROM = {  # page of the site -> file of the repository
    "index.md": "README.md",
    "pages.md": "docs/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "notebooks/index.md": "notebooks/README.md",
} | {f"notebooks/{path.stem}.md": f"notebooks/{path.name}" for path in sorted(ROOT.glob("notebooks/*.ipynb"))}
PAGE_OF = {file: page for page, file in PAGES_FROM.items()}
LINK = re.compile(r"(?<!!)(\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\])\(([^)\s]+)\)")
PICTURE = re.compile(r'<picture>.*?<img [^>]*src="docs/(\S+)_light\.svg"[^>]*alt="([^"]*)"[^>]*>.*?</picture>', re.S)
TABLE_PAGES = [ROOT / "docs" / name for name in ("objectives.md", "overrides.md")]
TABLE = re.compile(r"(<!-- table: (\w+) -->).*?<!-- end -->", re.S)  # the name of a table in `table_rows`
FENCE = re.compile(r"(^```.*?^```$)", re.S | re.M)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages that GitHub shows elsewhere in the repository."""
    from mkdocs.structure.files import File

    for page, name in PAGES_FROM.items():
        path = ROOT / name
        contents = notebook_page(page, path) if path.suffix == ".ipynb" else {page: path.read_text(encoding="utf-8")}
        for uri, content in contents.items():
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    uri = page.file.src_uri
    markdown = PICTURE.sub(r"![\2](\1_light.svg#only-light)\n![\2](\1_dark.svg#only-dark)", markdown)
    parts = FENCE.split(markdown)
    written = [part if part.startswith("```") else linked(part, uri, config.extra.get("source")) for part in parts]
    markdown = "".join(written)
    return markdown.replace("<!-- settings -->", settings_tables()) if "<!-- settings -->" in markdown else markdown


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Docstrings refer to names as Hugging Face's do, [`~trl.GRPOConfig`]: shown as code."""
    return re.sub(r"\[<code>~?(?:[\w.]+\.)?(\w+)</code>\]", r"<code>\1</code>", html)


# --- links ----------------------------------------------------------------------------------------------------------


def linked(markdown: str, uri: str, source: str | None) -> str:
    """`markdown` with its links, which are right on GitHub, as the site needs them.

    A file that has no page becomes a link to `source`, the address of the repository's files; without one, the label
    is all that stays.
    """
    origin = Path(PAGES_FROM.get(uri, f"docs/{uri}")).parent

    def replace(link: re.Match) -> str:
        label, target = link[1], link[2]
        name, _, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return link[0]
        file = os.path.normpath(origin / name)
        page = PAGE_OF.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if page is None:
            return f"{label}({source}/{file})" if source else label[1:-1]
        relative = os.path.relpath(page, Path(uri).parent)
        return f"{label}({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(replace, markdown)


# --- notebooks ------------------------------------------------------------------------------------------------------


def notebook_page(page: str, path: Path) -> dict[str, str | bytes]:
    """A notebook as a page with its outputs, and its pictures: uri -> content."""
    parts: list[str] = []
    pictures: dict[str, str | bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[f"notebooks/{name}"] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![output of the cell above]({name})")
            elif "text/html" in data:
                table = re.sub(r"<style.*?</style>\s*", "", "".join(data["text/html"]), flags=re.S)
                parts.append("\n".join(line.strip() for line in table.splitlines() if line.strip()))
            elif text := "".join(output.get("text") or data.get("text/plain") or []):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return {page: "\n\n".join(parts), **pictures}


# --- tables ---------------------------------------------------------------------------------------------------------


def settings_tables() -> str:
    """Every setting that `A3POConfig` adds to `GRPOConfig`, and those whose default differs."""
    from trl import GRPOConfig

    from trl_a3po import A3POConfig
    from trl_a3po.config.documentation import setting_rows

    rows = list(setting_rows())
    parts = []
    for heading in dict.fromkeys(row.group for row in rows):
        settings = [(row.name, row.default, row.help) for row in rows if row.group == heading]
        parts += [f"### {heading}", settings_table(settings)]
    inherited = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    changed = [
        (field.name, field.default, field.metadata["help"])
        for field in dataclasses.fields(A3POConfig)
        if field.name in inherited and field.name in A3POConfig.__annotations__
    ]
    return "\n\n".join([*parts, "### Defaults that differ from `GRPOConfig`", settings_table(changed)])


def settings_table(settings: Iterable[tuple[str, object, str]]) -> str:
    """A table of `(name, default, help)`."""
    rows = [["setting", "default", "what it does"]]
    for name, default, help_text in settings:
        described = re.sub(r"(?<![\w`])'[\w.]+'", lambda word: f"`{word[0]}`", help_text)
        described = re.sub(r"\b[a-z]+(?:_[a-z0-9]+)+(?:=\w+)?\b", lambda word: f"`{word[0]}`", described)
        rows.append([f"`{name}`", f"`{default!r}`", described])
    return markdown_table(rows)


def markdown_table(rows: list[list[str]]) -> str:
    """Rows, the header first, as a table of Markdown."""
    header, *rest = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rest])


def with_tables(markdown: str) -> str:
    """`markdown` with the tables between its markers as the code has them."""
    return TABLE.sub(
        lambda marked: f"{marked[1]}\n\n{markdown_table(table_rows(marked[2]))}\n\n<!-- end -->", markdown
    )


def table_rows(name: str) -> list[list[str]]:
    """The rows of a table: of the objectives' records, or of what becomes of TRL's methods and settings."""
    from trl_a3po.checks.overridden_methods import METHODS
    from trl_a3po.config.border_rows import border_table
    from trl_a3po.config.inherited_fields import FIELDS
    from trl_a3po.objectives import documentation

    match name:
        case "methods":
            return border_table(METHODS, "method")
        case "fields":
            return border_table(FIELDS, "setting")
    return getattr(documentation, f"{name}_table")()


if __name__ == "__main__":
    for page in TABLE_PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
