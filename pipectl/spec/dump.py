"""Writing a spec so that it means the same from any directory and on any machine."""

from __future__ import annotations

from typing import Any

import yaml

from pipectl.spec import references
from pipectl.spec.document import resolve
from pipectl.spec.models import JobSpec


def dump(spec: JobSpec) -> str:
    """YAML that :func:`pipectl.spec.load` reads as an equal of :func:`settled` ``(spec)``."""
    data = settled(spec).model_dump()
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def settled(spec: JobSpec) -> JobSpec:
    """The spec with all files named by absolute paths, and closed to site defaults."""
    data = spec.model_dump()
    for path, text in spec.factories():
        _set(data, path, str(references.parse(text, spec.base)))
    for path, file in spec.files():
        _set(data, path, str(file))
    data["environment"]["container"] = spec.container
    data["site_defaults"] = False
    absolute = JobSpec.model_validate(data)
    absolute._source = spec.source
    return absolute


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.2 would read as something else; repeats instead of aliases."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(resolve(text), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _set(data: dict[str, Any], path: tuple[str, ...], value: str) -> None:
    *outer, last = path
    for key in outer:
        data = data[key]
    data[last] = value
