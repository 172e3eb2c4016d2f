"""PyPI shows the README away from its folder: in the package's metadata, every link and image is absolute."""

import re
from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[2]


def test_links_and_images_are_absolute_in_the_metadata_and_lead_to_files_of_the_repository():
    readme = ProjectMetadata(str(ROOT), PluginManager()).core.readme
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert targets
    for target in targets:
        assert target.startswith("https://")
        if "anabranch/anabranch" in target:
            path = re.sub(r".*anabranch/(?:blob/)?main/|[?#].*", "", target)
            assert (ROOT / path).exists(), target


def test_svg_pictures_are_asked_for_as_pictures_and_not_as_text():
    readme = ProjectMetadata(str(ROOT), PluginManager()).core.readme
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", readme)
    assert pictures
    assert all(picture.endswith(".svg?sanitize=true") for picture in pictures)
