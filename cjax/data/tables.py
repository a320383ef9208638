"""Text in columns: `.tsv`, `.csv` and `.jsonl` files, parallel files, and a file of lines for each class."""

import csv
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Column = str | int
_NOT_DATA = ("readme", "license", "licence", ".", "_")


def read_columns(path: str | Path, columns: Sequence[Column], encoding: str = "utf-8") -> list[tuple[str, ...]]:
    """Some columns of a table, as text.

    Args:
        path: a `.tsv` (a tab between fields, no quotes), `.csv` or `.jsonl` file (an object on each line).
        columns: their names in the first line, or in the objects; or their numbers from 0, where no line names them.
        encoding: of the file.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: of another kind, empty, in another encoding, or with lines that lack a field: their numbers.
    """
    path = Path(path)
    text = read_text(path, encoding)
    if path.suffix == ".jsonl":
        records = _objects(path, text, columns)
    elif path.suffix in (".tsv", ".csv"):
        records = _fields(path, text, columns)
    else:
        raise ValueError(f"{path} is of no known kind; a table is a .tsv, a .csv or a .jsonl file")
    rows: list[tuple[str, ...]] = []
    wrong: list[tuple[int, str]] = []
    for line, found in records:
        lacking = [str(name) for name, field in zip(columns, found, strict=True) if field is None or not field.strip()]
        if lacking:
            wrong.append((line, f"no {' and no '.join(lacking)}"))
        else:
            rows.append(tuple(field.strip() for field in found if field is not None))
    refuse_lines(path, wrong)
    if not rows:
        raise ValueError(f"{path} holds no line of data")
    return rows


def read_lines(path: str | Path, encoding: str = "utf-8") -> list[str]:
    """The lines of a file; empty ones at its end don't count.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: empty, in another encoding, or with empty lines in between: their numbers.
    """
    path = Path(path)
    return _lines(path, read_text(path, encoding))


def read_class_files(path: str | Path, encoding: str = "utf-8") -> dict[str, list[str]]:
    """The lines of each file of a folder or a `.zip`, by the file's name without `.txt`; a README is left out.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: fewer than two files, two of one name, or one that `read_lines` refuses.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    if path.is_dir():
        contents = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    else:
        try:
            with zipfile.ZipFile(path) as archive:
                names = sorted(entry.filename for entry in archive.infolist() if not entry.is_dir())
                contents = {path / name: archive.read(name) for name in names}
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} is no folder, and no whole .zip file ({error})") from error
    found: dict[str, list[str]] = {}
    for file, content in contents.items():
        if file.name.lower().startswith(_NOT_DATA):
            continue
        name = file.name.removesuffix(".txt")
        if name in found:
            raise ValueError(f"{path} holds two files named {name}; each class has one")
        found[name] = _lines(file, _decode(file, content, encoding))
    if len(found) < 2:
        raise ValueError(f"{path} should hold a text file for each class; it holds: {', '.join(found) or 'none'}")
    return found


def read_text(path: Path, encoding: str) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return _decode(path, path.read_bytes(), encoding)


def refuse_lines(path: Path, wrong: Sequence[tuple[int, str]]) -> None:
    """Raises a ValueError that lists lines by number and what is wrong with each; nothing if there are none."""
    if wrong:
        listed = "; ".join(f"line {line}: {what}" for line, what in wrong[:8])
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(f"{path} has {len(wrong)} line(s) that can't be used: {listed}{more}")


def _decode(path: Path, content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding).removeprefix("\ufeff").replace("\r\n", "\n")
    except LookupError as error:
        raise ValueError(f'{path}: {error}; name its encoding, such as encoding="utf-8"') from error
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path} is not in {encoding}: byte {content[error.start]:#x} in line {line}; name its encoding, such as "
            'encoding="latin-1"'
        ) from error


def _lines(path: Path, text: str) -> list[str]:
    lines = [line.strip() for line in text.rstrip().split("\n")]
    if not any(lines):
        raise ValueError(f"{path} is empty")
    refuse_lines(path, [(number, "empty") for number, line in enumerate(lines, 1) if not line])
    return lines


def _objects(path: Path, text: str, columns: Sequence[Column]) -> Iterator[tuple[int, list[str | None]]]:
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        try:
            found = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no JSON ({error})") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path}, line {number} is no JSON object, such as {{{', '.join(map(repr, columns))}}}")
        fields = (found.get(str(name)) for name in columns)
        yield number, [None if field is None else str(field) for field in fields]


def _csv_records(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    try:
        for record in reader:
            yield reader.line_num, record
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num} is no CSV ({error})") from error


def _fields(path: Path, text: str, columns: Sequence[Column]) -> Iterator[tuple[int, list[str | None]]]:
    if path.suffix == ".csv":
        reader = csv.reader(io.StringIO(text, newline=""))
        records = _csv_records(path, reader)
    else:
        records = ((number, line.split("\t")) for number, line in enumerate(text.rstrip("\n").split("\n"), 1))
    places = [name for name in columns if isinstance(name, int)]
    if len(places) < len(columns):
        names = [name.strip() for name in next(records, (1, []))[1]]
        if unknown := [name for name in columns if name not in names]:
            raise ValueError(
                f"{path} has no column {' and none '.join(map(repr, unknown))}; its first line names "
                f"{', '.join(map(repr, names))}. Name others with columns=..., or give numbers from 0, such as "
                f"columns={tuple(range(len(columns)))}, if the first line is data"
            )
        places = [names.index(str(name)) for name in columns]
    for number, record in records:
        yield number, [record[place] if place < len(record) else None for place in places]
