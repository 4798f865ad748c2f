"""Writing a spec so that it means the same from any directory and on any machine."""

from __future__ import annotations

from typing import Any

import yaml

from pipectl.spec import references
from pipectl.spec.document import parse_scalar
from pipectl.spec.models import JobSpec


def dump(spec: JobSpec) -> str:
    """YAML that :func:`pipectl.spec.load` reads as an equal of :func:`make_absolute` ``(spec)``."""
    data = make_absolute(spec).model_dump()
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def make_absolute(spec: JobSpec) -> JobSpec:
    """The spec with all files named by absolute paths, and closed to site defaults."""
    data = spec.model_dump()
    named = [(path, str(references.parse(text, spec.base))) for path, text in spec.factories()]
    for path, name in [*named, *((path, str(file)) for path, file in spec.files())]:
        section = data
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = name
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
    style = None if isinstance(parse_scalar(text), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
