"""Whether a local folder can be loaded as a checkpoint, seen from its files without reading a weight.

What Transformers says about a file that is missing or cut off names neither the file nor the way out, and
says it when processes have started. Weights come from safetensors only: reading a pickle runs code.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rollout_pool.errors import ConfigError, one_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
AGAIN = "copy or download the folder again"


def refuse_unreadable(folder: str | Path) -> None:
    """Raise :class:`ConfigError` that names the file at fault in ``folder`` and the way out."""
    path = Path(folder)
    with _naming(path):
        _read_json(path / "config.json")
        for file in _weight_files(path):
            _require_whole(file)


def refuse_unreadable_config(folder: str | Path) -> None:
    """The same for ``config.json`` alone, for those who need no weights."""
    with _naming(Path(folder)):
        _read_json(Path(folder) / "config.json")


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except _Fault as fault:
        raise ConfigError(f"cannot load model {str(folder)!r}: {fault}") from None


class _Fault(Exception):
    """What is wrong, before the folder is named."""


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, as Transformers would choose them."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        places = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise _Fault(f"{INDEX} has no weight_map of tensors to files; {AGAIN}")
        files = [folder / name for name in sorted(set(places.values()))]
        lost = [file.name for file in files if not file.is_file()]
        if lost:
            what = (
                f"{lost[0]} is missing"
                if len(lost) == 1
                else f"{lost[0]} and {len(lost) - 1} more are missing"
            )
            raise _Fault(f"{what}, which {INDEX} names; {AGAIN}")
        return files
    pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
    if pickled:
        raise _Fault(
            f"its weights are pickled ({pickled[0]}), and reading a pickle can run any code; where it is "
            "trusted, load it once with Transformers and save it again with save_pretrained, as safetensors"
        )
    raise _Fault(f"there is neither {SINGLE} nor {INDEX}; {AGAIN}")


def _require_whole(file: Path) -> None:
    """Reads the header, and compares what it promises with the size of the file."""
    try:
        file.open("rb").close()  # what keeps it closed is told in other words than what is wrong inside
    except OSError as error:
        raise _Fault(f"cannot read {file.name}: {error.strerror}; check its permissions") from None
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        reason = one_line(error, 100).removeprefix("Error while deserializing header: ")
        raise _Fault(f"{file.name} is cut off or no safetensors file ({reason}); {AGAIN}") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _Fault(f"there is no {file.name}; give the folder of a model in Hugging Face format") from None
    except OSError as error:
        raise _Fault(f"cannot read {file.name}: {error.strerror}; check its permissions") from None
    except json.JSONDecodeError as error:
        raise _Fault(f"{file.name}, line {error.lineno}: not valid JSON ({error.msg}); {AGAIN}") from None
    except UnicodeDecodeError:
        raise _Fault(f"{file.name} is not UTF-8 text; {AGAIN}") from None
    if not isinstance(value, dict):
        raise _Fault(f"{file.name} holds no JSON object; {AGAIN}")
    return value
