"""Files of documents and rows at a path, also in folders as Hugging Face's ``datasets`` and its Hub lay them out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonpath
from pathlib import Path

from cordillera.data.language.documents import is_of_rows
from cordillera.data.paths import expand_paths
from cordillera.errors import DataError
from cordillera.files import read_json_object

_STATE = "state.json"
_BESIDE_ROWS = {"readme.md", "license", "license.md", "license.txt", "dataset_info.json", "dataset_dict.json", _STATE}
_TRAINING = {"train", "training"}
_EVALUATION = {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}


def data_files(path: str) -> tuple[Path, ...]:
    """Return the files of a file, folder or pattern, in the order in which they are read.

    Paths are expanded by :func:`cordillera.data.paths.expand_paths`. In a folder that ``save_to_disk`` of ``datasets``
    wrote, only the files that its ``state.json`` lists are returned, as other files hold results of ``map``. Beside
    files of rows (JSON lines, Parquet, Arrow), README, licence and descriptions of the set are left out.

    Raises:
        DataError: no file is found; a listed file is missing; or files of rows belong to training and to evaluation, by
            their names or those of their folders (``train-00000-of-00002.parquet``, ``test/0000.parquet``).
    """
    files = expand_paths(path)
    states = [file for file in files if file.name == _STATE]
    if states and "://" in path:
        remedy = "name the Arrow files, such as .../data-*.arrow, or copy the folder to this machine"
        raise DataError("a folder that datasets saved is not read from a store", where=path, remedy=remedy)
    saved = {state.parent: listed for state in states if (listed := _listed(state)) is not None}
    if saved:
        others = [file for file in files if file.parent not in saved]
        files = tuple(sorted([*others, *(file for listed in saved.values() for file in listed)]))
    if any(map(is_of_rows, files)):
        files = tuple(file for file in files if file.name.lower() not in _BESIDE_ROWS)
    _check_one_split(files, path)
    return files


def _listed(state: Path) -> list[Path] | None:
    """Return the files of a saved set; None if ``state`` is not of one."""
    names = read_json_object(state).get("_data_files")
    if names is None:
        return None
    remedy = "save the data set again, or copy its whole folder"
    try:
        files = [state.parent / Path(one["filename"]).name for one in names]
    except (TypeError, KeyError) as error:
        raise DataError("_data_files is no list of file names", where=str(state), remedy=remedy) from error
    if not files:
        raise DataError("the data set holds no rows", where=str(state.parent), remedy="leave it out")
    for file in files:
        if not file.is_file():
            raise DataError(f"{_STATE} lists a file that is not there", where=str(file), remedy=remedy)
    return files


def _check_one_split(files: Sequence[Path], path: str) -> None:
    """Refuse rows of training together with rows to evaluate on."""
    rows = [file for file in files if is_of_rows(file)]
    if len(rows) < 2:
        return
    root = Path(commonpath([file.parent for file in rows]))
    found = {split for file in rows if (split := _split_of(file, root)) is not None}
    if found & _TRAINING and found & _EVALUATION:
        raise DataError(
            f"the files belong to several splits: {', '.join(sorted(found))}",
            where=path,
            remedy=f"name the files of one, for example with the pattern {'...' if '://' in path else root}/**/train*",
        )


def _split_of(file: Path, root: Path) -> str | None:
    """Return the split in the name of a file, or else in that of the nearest of its folders below ``root``."""
    folders = reversed(file.parent.relative_to(root).parts)
    names = [re.split("[^a-z]", file.name.lower())[0], *(folder.lower() for folder in folders)]
    return next((name for name in names if name in _TRAINING | _EVALUATION), None)
