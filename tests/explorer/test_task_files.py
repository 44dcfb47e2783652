"""Rows of local files: their values are those that the file has, and what is wrong is named by its line."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hub import hub_of
from support.runs import environment

from trinity_lightning.config.taskset import TasksetConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.dataset import dataset_entries
from trinity_lightning.explorer.tasks.files import FileEntries
from trinity_lightning.explorer.tasks.taskset import Taskset, check_tasksets

MIXED = ["1.50", "true", "null", '{"a":1}', 3, "007", "1e3", "x", "2024-01-01", None, 0.1, True, 10**39]


def equal(value: Any, expected: Any) -> bool:
    """Equal with the same types: 1, 1.0 and True are not."""
    return repr(value) == repr(expected)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("folder", [False, True])
def test_values_reach_a_task_as_the_file_has_them(suffix, folder, tmp_path):
    rows = [{"prompt": "p", "answer": value} for value in MIXED]
    text = json.dumps(rows, indent=1) if suffix == "json" else "\n".join(map(json.dumps, rows))
    (tmp_path / f"train.{suffix}").write_text(text)
    path = tmp_path if folder else tmp_path / f"train.{suffix}"
    taskset = Taskset(dataset_entries(str(path), "train", None), order="sequential")
    assert equal([task.get("answer") for task in taskset], MIXED)


NESTED = [[], [1, 1.0, "1"], {}, {"b": None, "a": [{"c": 1}, {"c": "1"}]}]
ROW = st.dictionaries(
    st.sampled_from("abc"), st.sampled_from([*MIXED, *NESTED]) | st.text('a"\\\r\n\x85\u2028é😀', max_size=3)
)


@given(rows=st.lists(ROW, min_size=1, max_size=5), ascii_only=st.booleans())
def test_rows_of_json_are_exact(rows, ascii_only, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    text = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    (folder / "lines.jsonl").write_bytes("\r\n\n".join(text).encode("utf-8-sig"))
    (folder / "array.json").write_bytes(json.dumps(rows, indent=2, ensure_ascii=ascii_only).encode("utf-8-sig"))
    lines, array = FileEntries([folder / "lines.jsonl"]), FileEntries([folder / "array.json"])
    columns = dict.fromkeys(name for row in rows for name in row)
    assert equal(list(lines), [columns | row for row in rows])
    assert equal(list(array), list(lines))
    assert lines.place(len(rows) - 1).startswith(f"line {2 * len(rows) - 1} of ")


def test_columns_of_csv_are_numbers_only_if_nothing_is_lost(tmp_path):
    columns = {
        "whole": ["1", "-2", "", "30"],
        "number": ["0.5", "1", "1e-05", "2.25"],
        "code": ["007", "1", "2", "3"],
        "decimal": ["1.50", "2.25", "3.10", "4.20"],
        "truth": ["True", "False", "", "True"],
        "word": ["None", "nan", "a\n,b", "true"],
    }
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    entries = FileEntries([tmp_path / "rows.csv"])
    read = {name: [row[name] for row in entries] for name in columns}
    assert equal(read["whole"], [1, -2, None, 30])
    assert equal(read["number"], [0.5, 1, 1e-05, 2.25])
    assert equal(read["truth"], [True, False, None, True])
    assert all(read[name] == columns[name] for name in ("code", "decimal", "word"))
    assert [entries.place(index).split(" of ")[0] for index in range(4)] == ["line 2", "line 3", "line 4", "line 6"]
    as_text = FileEntries([tmp_path / "rows.csv"], as_text=True)
    assert [row["whole"] for row in as_text] == ["1", "-2", None, "30"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1, 2]", "line 3 of .*rows.jsonl is no JSON object"),
        (b'{"a": 1', "line 3 of .*rows.jsonl is no JSON object.* at column 8"),
        (b'{"a": ', "line 3 of .*rows.jsonl is no JSON object.*column"),
        (b'"text"', "line 3 of .*rows.jsonl is no JSON object"),
        ('{"a": "é"}'.encode("latin1"), "line 3 of .*rows.jsonl is no UTF-8.*iconv"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "line 3 of .*rows.jsonl has the key 'c' twice.*leave one"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(content, words, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n\n' + content)
    with pytest.raises(ConfigError, match=words):
        dataset_entries(str(tmp_path / "rows.jsonl"), "train", None)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.json", '[\n{"a": 1},\n{"a" 2}]', "line 3 of .*rows.json is no JSON"),
        ("rows.json", '[\n{"a": 1},\n7]', "line 3 of .*rows.json is no JSON object"),
        ("rows.json", '[\n{"a": 1}\n', "line 3 of .*rows.json is no JSON: Expecting"),
        ("rows.csv", "a,b\n1,2\n1,2,3\n", "line 3 of .*rows.csv has 3 cells, and the header 2"),
        ("rows.csv", 'a,b\n1,2\n1,"2\n', "line 3 of .*rows.csv is no CSV"),
        ("rows.csv", "a,a\n1,2\n", "line 1 of .*rows.csv: there are two columns 'a'"),
    ],
)
def test_an_array_or_table_that_cannot_be_read_is_named(name, content, words, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        FileEntries([tmp_path / name])


def test_slices_of_folders_are_those_of_their_splits(tmp_path):
    for split, rows in (("train", range(4)), ("test", range(10, 13))):
        (tmp_path / f"{split}.jsonl").write_text("".join(f'{{"row": {row}}}\n' for row in rows))
    for split in ("train", "test[1:]", "train[-1:]+test[:50%]"):
        expected = datasets.load_dataset(str(tmp_path), split=split)["row"]
        assert [row["row"] for row in dataset_entries(str(tmp_path), split, None)] == list(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "names", [("a.jsonl", "b.csv"), ("train.jsonl", "test.parquet"), ("a.csv", "b.parquet"), ("a.json", "b.csv")]
)
def test_a_folder_of_several_formats_is_refused(names, tmp_path):
    """`datasets` reads those of one of them."""
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"has files of several formats, such as {' and '.join(sorted(names))}: "):
        dataset_entries(str(tmp_path), "train", None)


def test_a_folder_says_itself_which_of_several_formats_are_its_splits(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "1.50"}\n{"a": 1}\n')
    (tmp_path / "b.csv").write_text("a\n2\n")
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: all\n  data_files: a.jsonl\n---\n")
    assert [row["a"] for row in dataset_entries(str(tmp_path), "train", None)] == ["1.50", 1]


@pytest.mark.parametrize(
    ("name", "text", "option"),
    [
        ("a.csv", "prompt\tanswer\nwhat, is 1+1?\t2\n", 'sep: "\\t"'),
        ("a.csv", '# of mine\nprompt,answer\n"what, is 1+1?",2\n', "skiprows: 1"),
        ("a.json", '{"rows": [{"prompt": "what, is 1+1?", "answer": 2}]}', "field: rows"),
    ],
)
def test_options_of_a_folders_readme_are_for_datasets_which_knows_them(name, text, option, tmp_path):
    (tmp_path / name).write_text(text)
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: {name}\n  {option}\n---\n"
    (tmp_path / "README.md").write_text(readme)
    assert list(dataset_entries(str(tmp_path), "train", None)) == [{"prompt": "what, is 1+1?", "answer": 2}]  # type: ignore[call-overload]


READ_FROM_HUB = """
from trinity_lightning.explorer.tasks.dataset import dataset_entries
print([row["a"] for split in ("train", "test[1:]") for row in dataset_entries("me/mixed", split, "main")])
"""


@pytest.mark.slow
def test_values_of_the_hub_are_those_of_its_files_and_stay_when_it_is_gone(tmp_path):
    config = "---\nconfigs:\n- config_name: main\n  data_files:\n"
    config += "".join(f"  - split: {split}\n    path: data/{split}.jsonl\n" for split in ("train", "test"))
    rows = [json.dumps({"a": value}) for value in MIXED]
    files = {"README.md": f"{config}---\n", "data/train.jsonl": "\n".join(rows), "data/test.jsonl": "\n".join(rows[:2])}
    with hub_of("me/mixed", {name: text.encode() for name, text in files.items()}) as url:
        shown = read_from_hub(tmp_path, HF_ENDPOINT=url)
    assert shown == f"{[*MIXED, MIXED[1]]}\n"
    assert read_from_hub(tmp_path, HF_HUB_OFFLINE="1") == shown


READ_PARTS = """
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.tasks.dataset import dataset_entries
try:
    print([row["prompt"] for row in dataset_entries("me/parts")])
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_what_was_downloaded_in_part_is_not_trained_on(tmp_path):
    files = {f"train-{part}.jsonl": f'{{"prompt": "{part}"}}\n'.encode() for part in ("a", "b")}
    with hub_of("me/parts", files) as url:
        assert read_from_hub(tmp_path, READ_PARTS, HF_ENDPOINT=url) == "['a', 'b']\n"
    assert read_from_hub(tmp_path, READ_PARTS, HF_HUB_OFFLINE="1") == "['a', 'b']\n"
    [file] = (tmp_path / "hub" / "datasets--me--parts" / "snapshots").rglob("train-b.jsonl")
    file.unlink()  # as if the first start had been killed
    printed = read_from_hub(tmp_path, READ_PARTS, HF_HUB_OFFLINE="1")
    assert "downloaded in part only (train-b.jsonl is missing)" in printed


def read_from_hub(folder: Path, code: str = READ_FROM_HUB, **variables: str) -> str:
    settings = environment() | {"HF_HOME": str(folder), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_that_changes_while_it_is_used_does_no_harm(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    entries = FileEntries([file])
    file.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    assert list(entries) == [{"a": 1}, {"a": 2}]


def test_what_is_done_to_an_entry_does_not_reach_its_next_use(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user"}]}')
    entries = FileEntries([tmp_path / "rows.jsonl"])
    entries[0]["messages"].append("more")
    assert entries[0] == {"messages": [{"role": "user"}]}


def test_rows_that_cannot_be_read_are_named_together(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"a": {row}}}\n' if row % 3 else '{"a": \n' for row in range(20)))
    with pytest.raises(ConfigError) as refused:
        FileEntries([file])
    text = str(refused.value)
    assert text.startswith("7 of 20 rows cannot be read. line 1 of ")
    assert [int(line) for line in re.findall(r"line (\d+) of", text)] == [1, 4, 7, 10, 13]
    assert text.endswith("And 2 more.")


def test_a_file_is_read_once_for_the_check_and_for_the_run(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a"}\n')
    config = TasksetConfig(name="t", source="dataset", path=str(file))
    check_tasksets({"taskset": config})
    stat = file.stat()
    file.write_text('{"prompt": "b"}\n')
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # another content that looks the same
    assert Taskset.from_config(config)[0]["prompt"] == "a"
    file.write_text('{"prompt": "changed"}\n')
    assert Taskset.from_config(config)[0]["prompt"] == "changed"
