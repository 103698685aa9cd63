"""Python and the packages: in the ranges that this package states, and not hidden by others."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_pool.doctor.check import Check, Checks, failed, ok, warning

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OURS = "rollout-pool"


def check_python(version: str | None = None) -> Checks[None]:
    """Against ``requires-python`` of the installed package. version: of this interpreter."""
    from packaging.specifiers import SpecifierSet

    version = version or platform.python_version()
    wanted = importlib.metadata.metadata(OURS)["Requires-Python"]
    if SpecifierSet(wanted).contains(version, prereleases=True):
        yield ok("Python", f"{version} at {sys.executable}")
    else:
        yield failed("Python", f"{version} at {sys.executable}", f"make an environment with Python {wanted}")


def requirements(extras: Sequence[str] = ("",)) -> Iterator[Requirement]:
    """What the installed package says it needs here, by its own metadata."""
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires(OURS) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if any(marker is None or marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def check_packages(extras: Sequence[str] = ("",)) -> Checks[None]:
    """One record for all that fit, and one for each that does not, or is not the one that is imported."""
    try:
        wanted = list(requirements(extras))
    except importlib.metadata.PackageNotFoundError:
        yield failed(
            "packages",
            f"{OURS} is not installed, so the versions it needs are not known",
            "pip install -e . in the checkout, or pip install rollout-pool",
        )
        return
    fine = []
    for requirement in wanted:
        fault = _fault(requirement)
        if fault is None:
            fine.append(f"{requirement.name} {importlib.metadata.version(requirement.name)}")
        else:
            yield fault
    yield ok("packages", ", ".join(fine) or "none of them")


def check_extra(extra: str) -> Checks[None]:
    """What one of our extras needs beyond the rest."""
    common = {requirement.name for requirement in requirements()}
    wanted = [one for one in requirements((extra,)) if one.name not in common]
    faults = [fault for requirement in wanted if (fault := _fault(requirement)) is not None]
    yield from faults
    if not faults:
        fine = ", ".join(f"{one.name} {importlib.metadata.version(one.name)}" for one in wanted)
        yield ok(f"extra {extra}", fine)


def _fault(requirement: Requirement) -> Check | None:
    name, label = requirement.name, f"package {requirement.name}"
    asked = f"{name}{requirement.specifier}"
    install = f"pip install '{asked}'"
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return failed(label, f"not installed; {asked} is needed", install)
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        return failed(label, f"version {distribution.version}; {asked} is needed", install)
    for module in _modules(distribution):
        expected = Path(str(distribution.locate_file(f"{module}/__init__.py"))).resolve()
        found = origin(module)
        if found is None:
            return failed(
                label, f"is installed, but {module} cannot be imported", f"{install} --force-reinstall"
            )
        if found.resolve() != expected:
            return failed(
                label,
                f"{found} hides {module} {distribution.version} of {expected.parent.parent}",
                f"rename or remove {found}, or take its folder off PYTHONPATH",
            )
    return None


def _modules(distribution: importlib.metadata.Distribution) -> list[str]:
    """The packages at the top that a distribution installed as real files, so not in editable mode."""
    files = distribution.files or []
    tops = [f.parts[0] for f in files if len(f.parts) == 2 and f.name == "__init__.py"]
    return [top for top in tops if top.isidentifier()]


def origin(module: str) -> Path | None:
    """The file that ``import module`` finds on ``sys.path``, or the folder of one without ``__init__.py``.

    Not what this process has imported already: its first import may have been under another path.
    """
    spec = importlib.machinery.PathFinder.find_spec(module)
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin)
    return Path(next(iter(spec.submodule_search_locations or []), ""))


def check_kernels() -> Checks[None]:
    """``kernels`` is a package of the hub that Transformers imports; a folder of that name hides it."""
    found = origin("kernels")
    if found is None:
        yield ok("kernels", "no package and no folder of that name, so nothing is hidden")
        return
    try:
        distribution = importlib.metadata.distribution("kernels")
        expected = Path(str(distribution.locate_file("kernels/__init__.py"))).resolve()
    except importlib.metadata.PackageNotFoundError:
        expected = None
    if expected == found.resolve():
        yield ok("kernels", f"the hub's package, {distribution.version}")
        return
    folder = found.parent if found.name == "__init__.py" else found
    yield failed(
        "kernels",
        f"`import kernels` finds {folder}, which Transformers would take for the hub's package of that name",
        f"take {folder.parent} off PYTHONPATH; with `python -m`, set PYTHONSAFEPATH=1",
    )


def check_shadows(places: Sequence[str]) -> Checks[None]:
    """Modules in ``places`` that hide installed ones or those of Python.

    places: folders that come before the installed packages: PYTHONPATH, and the working directory, which
    Ray puts on the path of its workers.
    """
    installed = {module for r in requirements() for module in _installed_modules(r.name)}
    known = installed | set(sys.stdlib_module_names)
    hiding = []
    for place in dict.fromkeys(places):
        hiding += [str(path) for path in sorted(Path(place).glob("*")) if _module_name(path) in known]
    if hiding:
        yield warning(
            "module path",
            f"hidden by files of the same name: {', '.join(hiding[:3])}{' ...' if len(hiding) > 3 else ''}",
            "rename them, or start elsewhere: Ray's workers import from the working directory first",
        )
    else:
        yield ok("module path", f"nothing is hidden by {', '.join(dict.fromkeys(places)) or 'PYTHONPATH'}")


def leading_places(environment: dict[str, str]) -> list[str]:
    """Folders whose modules Ray's workers find before the installed ones."""
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    return [*places, os.getcwd()]


def _installed_modules(name: str) -> list[str]:
    try:
        return _modules(importlib.metadata.distribution(name))
    except importlib.metadata.PackageNotFoundError:
        return []


def _module_name(path: Path) -> str | None:
    if path.suffix == ".py":
        return path.stem
    return path.name if (path / "__init__.py").is_file() else None
