"""What a build adds to ``pyproject.toml``: man pages, and links in the README."""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class ManPages(BuildHookInterface[Any]):
    """Puts the man pages of ``make dist`` into the wheel, where ``man`` finds them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Add them if there are any; pip installs a checkout without them."""
        for page in sorted(Path(self.root, "build", "man").glob("*.1")):
            build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"


class Readme(MetadataHookInterface):
    """Makes the links of the README lead to the repository, since an index shows it alone."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the text."""
        source, version = metadata["urls"]["Source"], metadata["version"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\]\((?!https?:|#)", f"]({source}/blob/v{version}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
