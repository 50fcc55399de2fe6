"""The documentation names files, functions and commands that exist; ``make docs`` checks links."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from etrain_jupyter.config.cell import parse_cell
from etrain_jupyter.notebook.commands.subcommands import subcommands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
REFERENCE = [page for page in PAGES if "<!-- end -->" in page.read_text(encoding="utf-8")]
PACKAGE = ROOT / "etrain_jupyter"
SOURCE_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|ts))(?::(\w+))?`")
"""``trainer/loop/train_loop.py:run`` in a page; the function may be missing."""

# Files of the reader, which a page tells them to write.
EXAMPLES = {"cluster.py"}


def named_in(pages: list[Path]) -> Iterator[tuple[str, str, str]]:
    """Yield page, source file and function (or ``""``) of every mention."""
    for page in pages:
        for file, function in SOURCE_FILE.findall(page.read_text(encoding="utf-8")):
            yield str(page.relative_to(ROOT)), file, function


def find_source(file: str) -> Path | None:
    """Return the file, given relative to the package or to the repository."""
    found = [base / file for base in (PACKAGE, ROOT) if (base / file).is_file()]
    return found[0] if found else None


def functions_of(path: Path) -> set[str]:
    """Return the names of all functions and methods in a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_source_file_named_in_the_docs_exists() -> None:
    missing = [
        (page, file)
        for page, file, _ in named_in(PAGES)
        if find_source(file) is None
        and file not in EXAMPLES
        and not [*(ROOT / "tests").rglob(file)]
    ]

    assert missing == []


def test_every_function_named_in_the_docs_exists() -> None:
    named = [entry for entry in named_in(PAGES) if entry[2]]
    missing = [
        f"{page}: {file}:{function}"
        for page, file, function in named
        if (path := find_source(file)) is None or function not in functions_of(path)
    ]

    assert len(named) > 30, "the life cycles of the architecture page are gone"
    assert missing == []


def test_every_page_named_in_code_exists() -> None:
    sources = [
        path
        for folder in ("etrain_jupyter", "tests", "notebooks", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".ipynb", ".md")
    ]
    sources.append(ROOT / ".ci" / "run")
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in sources
        for page in re.findall(r"(?<![\w/.])(?:\.\./)?(docs/[\w/.-]+\.md)", path.read_text("utf-8"))
    }

    assert named != set()
    assert [found for found in named if not (ROOT / found[1]).is_file()] == []


@pytest.mark.plugins
def test_commands_page_lists_every_sub_command() -> None:
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"`%etrain ([a-z]+)", page))

    assert shown == {command.name for command in subcommands()}


def load_hooks() -> ModuleType:
    """Import the MkDocs hook, which is in no package."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.plugins
@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="platform: argparse has another format")
def test_generated_parts_of_a_page_are_up_to_date(page: Path) -> None:
    committed = page.read_text(encoding="utf-8")

    assert committed == load_hooks().generate(committed), "run: make snapshot"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("cell-keys.md", "| `batch.per_worker` |"),
        ("ec2-pool-keys.md", "| `lifetime.lease_ttl` | 5 min |"),
        ("slurm-pool-keys.md", "| `lifetime.away` | 5 min |"),
        ("commands.md", "usage: %etrain resume"),
        ("api/jobs.md", "    def load_into(self, model: Model"),  # a method
        ("api/jobs.md", "    def chaos("),  # an inherited method
        ("api/config.md", "    epochs: Annotated"),  # an attribute
        ("api/recipes.md", "def find_pretrained("),
    ],
)
def test_reference_can_be_read_without_building_the_site(page: str, expected: str) -> None:
    assert expected in (DOCS / "reference" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["cell-keys.md", "ec2-pool-keys.md", "slurm-pool-keys.md"])
def test_every_key_in_a_table_has_a_meaning(page: str) -> None:
    lines = (DOCS / "reference" / page).read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]

    assert len(rows) > 10
    assert [row[0] for row in rows if len(row[2]) < 10] == []


@pytest.mark.plugins
def test_site_shows_the_api_with_its_own_layout() -> None:
    page = "<!-- ::: a.b\n    options:\n      members: [c]\n-->\n\ntext\n\n<!-- end -->\n\nrest"

    shown = load_hooks().on_page_markdown(page)

    assert shown == "::: a.b\n    options:\n      members: [c]\n\nrest"


@pytest.mark.plugins
def test_names_in_the_first_column_stay_on_one_line() -> None:
    html = load_hooks().on_page_content("<td><code>data.num_workers</code></td><td><code>a</code>")

    assert html.startswith('<td style="white-space: nowrap"><code>data.num_workers</code></td>')
    assert html.endswith("<td><code>a</code>")


@pytest.mark.plugins
def test_markers_of_literal_blocks_are_removed() -> None:
    hooks = load_hooks()

    assert hooks.on_page_content("<p>For example::</p><p>::</p>") == "<p>For example:</p>"


def test_readme_takes_two_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert len(text.split()) < 750
    assert "make demo" in text
    assert "make test" in text


CELL = re.compile(r"```yaml\n%%etrain distributed .*\n((?:.*\n)*?)```")
CELLS = [
    pytest.param(body, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, body in enumerate(CELL.findall(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("body", CELLS)
def test_cell_in_a_page_is_valid(body: str) -> None:
    used_with_py = {"x": None, "y": None, "BUCKET": "my-bucket"}

    assert parse_cell(body, namespace=used_with_py).config.model


def test_cells_in_pages_are_found() -> None:
    assert len(CELLS) >= 5
