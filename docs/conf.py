"""Sphinx settings. Warnings are errors (`make docs`); a page that nothing links to is a warning."""

from anabranch import __version__

project = "anabranch"
author = "the anabranch authors"
copyright = "the anabranch authors"  # noqa: A001 -- Sphinx's name
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx"]
intersphinx_mapping: dict[str, tuple[str, str | None]] = {}
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "anabranch"
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
nitpicky = True
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(collections\.abc|datetime|typing|asyncio|pathlib|msgspec|botocore|builtins|contextlib|ssl)\..*",
    ),
    (
        r"py:.*",
        r"(T|optional|datetime|Any|Path|Callable|Sequence|Literal|Iterator|AsyncIterator|Protocol|Generic)",
    ),
    (
        r"py:.*",
        r"(Literal|dict|list|tuple)\[.*",
    ),  # what Sphinx makes of a type with a comma in it
    (
        r"py:.*",
        r"anabranch\.\w+\.(T|R|ValueT|BatchDecorator)",
    ),  # type variables, and the type of a decorator
    (
        r"py:.*",
        r"anabranch\.dead_letters\.redrive\.HasHandler",
    ),  # what a consumer is to a redrive
    (
        r"py:.*",
        r"anabranch\._.*",
    ),  # private parts are explained in design.md, not documented name by name
    (
        r"py:.*",
        r"(str|int|float|bytes|bool|None|object|tuple|list|dict|type|set|BaseException|Exception|ValueError)",
    ),
]
