import zipfile
from pathlib import Path

import pytest

from cjax.data.tables import read_class_files, read_columns, read_lines


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_tables_of_every_kind(tmp_path: Path):
    rows = [('a "b", c', "1"), ("d", "0")]
    tsv = write(tmp_path / "a.tsv", 'text\tid\tlabel\r\na "b", c\t7\t1\r\nd\t8\t0\r\n')
    csv = write(tmp_path / "a.csv", '\ufefflabel,text\n1,"a ""b"", c"\n0,d\n')
    jsonl = write(tmp_path / "a.jsonl", '{"text": "a \\"b\\", c", "label": 1}\n{"text": "d", "label": 0, "x": []}\n')
    for path in (tsv, csv, jsonl):
        assert read_columns(path, ("text", "label")) == rows
    assert read_columns(write(tmp_path / "b.tsv", "d\t8\t0\n"), (0, 2)) == [("d", "0")]


def test_a_field_over_several_lines(tmp_path: Path):
    path = write(tmp_path / "a.csv", 'text,label\n"one\ntwo",1\n,0\n')
    with pytest.raises(ValueError, match=r"1 line\(s\) .*: line 4: no text"):
        read_columns(path, ("text", "label"))


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.tsv", "text\tlabel\na\t1\nb\n\t\n", r"2 line\(s\) .*: line 3: no label; line 4: no text and no label$"),
        ("a.tsv", "text\tlabel\n" + "a\t\n" * 10, "10 line.*line 9: no label; and 2 more"),
        ("a.tsv", "text\tlabel\n", "no line of data"),
        ("a.tsv", "a\t1\nb\t2\n", r"no column 'text' and none 'label'; .* names 'a', '1'.*columns=\(0, 1\)"),
        ("a.csv", "", "no column 'text'"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "a"\n', "line 2 is no JSON"),
        ("a.jsonl", '["a", 1]', "line 1 is no JSON object, such as {'text', 'label'}"),
        ("a.jsonl", '{"text": "a", "label": null}', "line 1: no label"),
        ("a.xlsx", "?", "of no known kind; a table is a .tsv, a .csv or a .jsonl"),
        ("a.tsv", b"text\tlabel\ncaf\xe9\t1\n", 'not in utf-8: byte 0xe9 in line 2; .* encoding="latin-1"'),
    ],
)  # fmt: skip
def test_lines_that_lack_something_are_numbered(tmp_path: Path, name: str, text: str | bytes, message: str):
    with pytest.raises(ValueError, match=message):
        read_columns(write(tmp_path / name, text), ("text", "label"))


def test_lines(tmp_path: Path):
    assert read_lines(write(tmp_path / "a", " b\u2028c \nd\n\n \n")) == ["b\u2028c", "d"]
    with pytest.raises(ValueError, match="line 2: empty; line 3: empty"):
        read_lines(write(tmp_path / "a", "b\n\n \nc"))
    with pytest.raises(ValueError, match="a is empty"):
        read_lines(write(tmp_path / "a", "\n \n"))
    with pytest.raises(FileNotFoundError, match="no file .*b"):
        read_lines(tmp_path / "b")


def test_a_file_for_each_class_in_a_folder_or_an_archive(tmp_path: Path):
    folder = tmp_path / "films"
    (folder / "inner").mkdir(parents=True)
    write(folder / "README.txt", "about")
    write(folder / ".hidden", "x")
    write(folder / "rt.neg", "caf\xe9\nb\n".encode("latin-1"))
    write(folder / "inner" / "pos.txt", "c\n")
    with zipfile.ZipFile(tmp_path / "films.zip", "w") as archive:
        for file in folder.rglob("*"):
            archive.write(file, file.relative_to(folder))
    for path in (folder, tmp_path / "films.zip"):
        assert read_class_files(path, "latin-1") == {"pos": ["c"], "rt.neg": ["caf\xe9", "b"]}
        with pytest.raises(ValueError, match="rt.neg is not in utf-8: byte 0xe9 in line 1"):
            read_class_files(path)


def test_classes_that_cannot_be(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        read_class_files(tmp_path / "nowhere")
    write(tmp_path / "a.txt", "one")
    with pytest.raises(ValueError, match="a text file for each class; it holds: a$"):
        read_class_files(tmp_path)
    write(tmp_path / "b.txt", "")
    with pytest.raises(ValueError, match="b.txt is empty"):
        read_class_files(tmp_path)
    write(tmp_path / "b.txt", "x")
    write(tmp_path / "b", "x")
    with pytest.raises(ValueError, match="two files named b"):
        read_class_files(tmp_path)


def test_files_that_are_broken_are_named(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="a.jsonl, line 1 is no JSON"):
        read_columns(file, ("a",))
    file = tmp_path / "a.csv"
    file.write_text("a,b\n" + "x" * 200_000 + ",1\n")
    with pytest.raises(ValueError, match="a.csv, line 2 is no CSV"):
        read_columns(file, ("a", "b"))
    with pytest.raises(ValueError, match="no folder, and no whole .zip"):
        read_class_files(file)
    with pytest.raises(ValueError, match="unknown encoding: nothing"):
        read_columns(file, ("a",), "nothing")
