"""The report's page: complete without anything else, safe whatever the completions hold, and content with little."""

import csv
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pictures import random_picture

from trinity_lightning.common.pictures.thumbnail_files import COLUMN, FOLDER
from trinity_lightning.common.pictures.thumbnails import write_thumbnails
from trinity_lightning.monitor.machine import describe_environment, write_environment
from trinity_lightning.monitor.presentation import UNTRAINED_PREFIX as UNTRAINED
from trinity_lightning.monitor.report.charts import line_chart, nice_ticks, stacked_bars, thinned
from trinity_lightning.monitor.report.hiding import without_secrets
from trinity_lightning.monitor.report.page import report_page
from trinity_lightning.monitor.report.record import read_run
from trinity_lightning.monitor.report.texts import labels, short, visible

EVIL = "</pre></svg><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&lt;b&gt;"
VOID = {"meta", "hr", "br", "wbr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements of a page, and whether they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def write_metrics(folder: Path, rows: Sequence[Mapping[str, object]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_completions(folder: Path, name: str, texts: list[str], reward: float = 1.0) -> None:
    (folder / "completions").mkdir(exist_ok=True)
    records = [
        {"task": task, "prompt": f"Q{task} {EVIL}", "completion": text, "reward": reward, "truncated": task == 0}
        for task, text in enumerate(texts)
    ]
    records[0] |= {COLUMN: ["../../config.yaml", EVIL, 3]}
    (folder / "completions" / name).write_text("\n".join(map(json.dumps, records)) + '\n{"torn', encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with everything in it, much of it hostile."""
    (tmp_path / "config.yaml").write_text(f"name: {EVIL}\nbuffer:\n  url: postgresql://me:hunter2@host/db\n")
    reward = {f"eval/held{EVIL}/mean@1": 0.2, f"eval/held{EVIL}/pass@1": 0.2}
    evaluations = {**reward, "eval/held/length/mean@1": 0.7, "eval/held/seconds": 3.0}
    rows: list[dict[str, object]] = [{"step": 0, "explore_step": 0, **evaluations}]
    for step in range(1, 6):
        losses = {"actor/grad_norm": "nan" if step == 3 else step / 2, "time/train": 2.0, "time/rollout": 4.0}
        rows += [
            {"step": 2 * step, "explore_step": step, "reward/mean": step / 10, **losses},
            {"step": 2 * step + 1, "explore_step": step, "time/train": 3.0, "rollout/failed_tasks": 0},
        ]
    write_metrics(tmp_path, rows)
    write_completions(tmp_path, "eval_held_step_0.jsonl", ["before 0", "before 1", "before 2"], reward=0.0)
    write_completions(tmp_path, "eval_held_step_5.jsonl", [f"after 0 {EVIL}", "after 1"])
    write_completions(tmp_path, "eval_held_step_3.jsonl", ["between"])
    write_completions(tmp_path, "step_1.jsonl", ["\ud800 lone surrogate"])
    write_environment(tmp_path)
    return tmp_path


def page_of(folder: Path) -> Page:
    run = read_run(folder)
    run.kept, run.kept_steps = [(1, 80, 16, 900, "0.25", "0.05")], 30
    return Page(report_page(run))


def test_everything_is_on_the_page(folder: Path) -> None:
    page = page_of(folder)
    headings = [text for text in page.texts if text in ("Curves", "Where the time went", "Before and after")]
    assert headings == ["Curves", "Where the time went", "Before and after"] * 2  # as links, and as headings
    for part in ("reward/mean", "0.1 → 0.5", "before 0", "after 1", "Environment", "Python", "1 of 30 steps"):
        assert part in page.text
    assert "between" not in page.text
    assert "before 2" not in page.text  # has no counterpart
    assert "length/mean@1" not in page.text
    assert "failed_tasks" not in page.text  # a line that never moves
    assert [value for value in page.texts if value in ("25s", "20s", "3s")] == ["20s", "25s", "3s"]


@pytest.mark.parametrize("evaluations", [2, 1], ids=["before and after", "apart"])
def test_pictures_of_prompts_are_part_of_the_page(evaluations: int, tmp_path: Path) -> None:
    pictures = [random_picture(seed, (9, 9)) for seed in range(3)]
    names = [f"{picture.digest}.jpg" for picture in pictures]
    write_thumbnails(tmp_path / "completions" / FOLDER, {names[0]: pictures[0].thumbnail, names[1]: b"x" * 2**17})
    record = {"task": 0, "prompt": "[picture]?", "completion": "3", COLUMN: names}
    for step in range(evaluations):
        (tmp_path / f"completions/eval_held_step_{step}.jsonl").write_text(json.dumps(record))
    page = page_of(tmp_path)
    (source,) = [attrs["src"] for tag, attrs in page.tags if tag == "img"]  # one has no file, and one is too large
    assert source == f"data:image/jpeg;base64,{b64encode(pictures[0].thumbnail).decode()}"


def test_rollouts_ahead_count_by_the_wait_for_them_only(tmp_path: Path) -> None:
    in_turn = {"step": 0, "explore_step": 1, "time/rollout": 5.0, "time/operators": 1.0, "time/train": 4.0}
    ahead = in_turn | {"step": 1, "explore_step": 2, "time/wait_for_rollout": 2.0, "rollout/overlap": 0.9}
    write_metrics(tmp_path, [in_turn, ahead])
    texts = [text.strip() for text in page_of(tmp_path).texts if text.strip()]
    assert texts[texts.index("rollouts and training") + 1] == "16s"
    rows = {part: texts[len(texts) - texts[::-1].index(part)] for part in ("rollout", "wait_for_rollout", "train")}
    assert rows == {"rollout": "5s", "wait_for_rollout": "2s", "train": "8s"}


def test_hostile_text_stays_text(folder: Path) -> None:
    page = page_of(folder)
    assert EVIL in page.text
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "embed", "link", "form"}
    ids = {attributes.get("id") for _, attributes in page.tags}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style")]
        link = attributes.get("href")
        assert link is None or (link.startswith("#") and link[1:] in ids)
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert "hunter2" not in page.text


def test_a_page_needs_nothing_else(folder: Path) -> None:
    text = report_page(read_run(folder))
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"url\(|@import|https?:", style)
    assert len(text) < 200_000
    assert 'name="viewport"' in text


@pytest.mark.parametrize("names", [(), ("config.yaml",), ("metrics.csv",), ("completions",), ("environment.json",)])
def test_what_is_missing_is_left_out(folder: Path, names: tuple[str, ...], tmp_path_factory) -> None:
    poor = tmp_path_factory.mktemp("poor")
    for name in names:
        (folder / name).rename(poor / name)
    assert page_of(poor).text


def test_without_a_second_evaluation_the_first_and_the_last_step_are_shown(tmp_path: Path) -> None:
    write_completions(tmp_path, "eval_held_step_0.jsonl", ["evaluated once"])
    write_completions(tmp_path, "step_1.jsonl", ["first"])
    write_completions(tmp_path, "step_9.jsonl", ["x" * 5000])
    text = page_of(tmp_path).text
    assert "first" in text
    assert "evaluated once" not in text
    assert "3500 more characters" in text
    assert "x" * 1501 not in text


def test_damaged_files_do_not_stop_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,explore_step,reward/mean\n1,1,0.5\n2,oops,0.6\n3,3,huh\n4,4")
    assert "0.5" in page_of(tmp_path).text
    (tmp_path / "metrics.csv").write_text("step,explore_step,reward/mean,actor/grad_norm\n1,1,0.5,1e300\n")
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions" / "step_1.jsonl").write_bytes(b'\xff\xfe\n[1]\n{"completion": 3}\n')
    (tmp_path / "environment.json").write_text("[]")
    assert "0.5" in page_of(tmp_path).text


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.floats(allow_nan=True)), min_size=1, max_size=30))
def test_any_numbers_make_a_picture(points) -> None:
    points = [(float(x), y) for x, y in sorted(points, key=lambda point: point[0])]
    if not any(abs(y) < 1e100 for _, y in points):
        with pytest.raises(ValueError, match="finite"):
            line_chart({"a": points}, "label")
        return
    picture = line_chart({EVIL: points}, EVIL)
    Page(picture)
    assert "nan" not in picture
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]*)"', picture))):
        assert 0 <= float(x) <= 360
        assert 0 <= float(y) <= 190


def test_bars_stand_on_each_other() -> None:
    picture = stacked_bars([1.0, 2.0], {"a": [1.0, 0.0], "b": [3.0, 4.0]}, "label")
    boxes = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', picture)
    (a_top, a_height), (b_top, b_height) = [tuple(map(float, boxes[index])) for index in (0, 2)]
    assert b_top + b_height == pytest.approx(a_top, abs=0.11)
    assert b_height == pytest.approx(3 * a_height, abs=0.3)


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    names = ("time/rollout", "time/train", "reward/mean", "experience_pipeline/trained")
    cells = [[step % 7, 1.5, step / 3000, 0] for step in range(3000)]
    rows: list[dict[str, object]] = [
        {"step": step, "explore_step": step + 1, **dict(zip(names, row, strict=True))} for step, row in enumerate(cells)
    ]
    write_metrics(tmp_path, rows)
    page = report_page(read_run(tmp_path))
    assert len(page) < 120_000
    assert page.count("<rect") <= 300
    text = " ".join(Page(page).text.split())
    assert "3000 of 3000 steps" in text
    assert "The last 50 are" in text
    assert re.findall(r"<td[^>]*>3000</td>|<th[^>]*>3000</th>", page)


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_no_two_ticks_of_an_axis_have_the_same_label(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    assert len({*labels(ticks).values()}) == len(ticks)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 0.5, 1.0], ["0", "0.5", "1"]),
        ([100000.0, 102000.0, 104000.0], ["1.00e5", "1.02e5", "1.04e5"]),
        ([0.99990, 0.99995, 1.0], ["0.9999", "0.99995", "1"]),
        ([9.98e-4, 9.99e-4, 1e-3], ["9.98e-4", "9.99e-4", "0.001"]),
        ([7.0], ["7"]),
    ],
)
def test_labels_have_the_digits_that_tell_them_apart(values: list[float], texts: list[str]) -> None:
    assert list(labels(values).values()) == texts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\n" * 32, "⟨32 newlines⟩"),
        ("   ", "⟨3 blank characters⟩"),
        ("\n \t\n", "⟨2 newlines, 2 other blank characters⟩"),
        ("5" + "\n" * 31, "5\n⟨31 newlines⟩\n"),
        ("a\n \n\n  \nb", "a\n⟨4 newlines⟩\nb"),
        ("a\n\n\nb", "a\n\n\nb"),
        ("", ""),
    ],
)
def test_what_is_blank_is_said(text: str, shown: str) -> None:
    assert visible(text) == shown


def tiles(folder: Path) -> list[str]:
    page = report_page(read_run(folder)).replace("<wbr>", "")
    return re.findall(r'<div class="fact"><dt class="quiet">([^<]*)<', page)


def test_the_first_tile_is_the_held_out_score(tmp_path: Path) -> None:
    row = {"step": 0, "explore_step": 1, "reward/mean": 0.5}
    write_metrics(tmp_path, [row])
    assert tiles(tmp_path)[:2] == ["explore steps", "reward/mean"]
    held = {
        f"eval/{name}/{metric}": 0.5 for name in ("a", "b/c") for metric in ("mean@2", "std@2", "x/mean@2", "seconds")
    }
    write_metrics(tmp_path, [row | held | {"eval/a/failed_tasks": 0, "eval/b/c/failed_tasks": 0}])
    assert tiles(tmp_path)[:3] == ["eval/a/mean@2", "eval/b/c/mean@2", "explore steps"]
    write_metrics(tmp_path, [{"step": 0, "explore_step": 1, "eval/loss": 2.0}, {"explore_step": 9, "eval/loss": 1.0}])
    assert tiles(tmp_path)[:2] == ["eval/loss", "explore steps"]


@pytest.mark.parametrize(
    ("config", "criterion"),
    [
        ("name: x", "right at 1"),
        ("reward_solved: {mine/right: 0.5, short: 0.1}", "mine/right at 0.5 and mine/short at 0.1"),
        ("reward_solved: [", "right at 1"),
    ],
)
def test_what_counts_as_solved_is_said_beside_its_curve(config: str, criterion: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config)
    more = {"eval/a/reward/mine/short/mean@1": 0.1} if "short" in config else {}
    part = "eval/a/reward/mine/right/mean@1" if more else "eval/a/reward/right/mean@1"
    rows = [
        {"explore_step": step, "eval/a/mean@1": step / 2, "eval/a/pass@1": step / 2, part: step / 2} | more
        for step in (0, 1)
    ]
    write_metrics(tmp_path, rows)
    assert f'Held-out, solved <span class="unit">{criterion}</span>' in report_page(read_run(tmp_path))


def test_ticks_numbers_and_thinning() -> None:
    assert nice_ticks(0.0, 1.0) == [0.0, 0.5, 1.0]
    assert nice_ticks(0.13, 0.71) == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert nice_ticks(3.0, 3.0)[0] < 3 < nice_ticks(3.0, 3.0)[-1]
    assert [short(value) for value in (0.0, 0.25, 12345.6, 2e-5, 3.2e7)] == [
        "0",
        "0.25",
        "1.235e+04",
        "2.0e-5",
        "3.2e7",
    ]
    many = [(float(x), float(x)) for x in range(1000)]
    assert len(thinned(many)) == 334
    assert thinned(many)[0] == (0.0, 1.0)


def test_secrets_stay_behind() -> None:
    config = (
        "a:\n  url: postgresql://me:p@ss@host/db\n  api_key: abc\n  max_tokens: 3\n  password: null\n  path: a:b@c\n"
    )
    assert without_secrets(config) == (
        "a:\n  url: postgresql://me:***@host/db\n  api_key: '***'\n  max_tokens: 3\n  password: null\n  path: a:b@c\n"
    )


SECRET_LINES = {
    "token: abc": "token: '***'",
    "hf_token: abc": "hf_token: '***'",
    "hfToken: 'a b'": "hfToken: '***'",
    "'x-api_key': abc": "x-api_key: '***'",
    "- token: abc\n  name: me": "- token: '***'\n  name: me",
    "env:\n- HF_TOKEN=abc\n- HOME=/x\n- MY_SECRET=abc": "env:\n- HF_TOKEN=***\n- HOME=/x\n- MY_SECRET=***",
    "env:\n- A_TOKEN=abc\n  abc\n- B=1": "env:\n- A_TOKEN=***\n- B=1",
    "- run: WANDB_API_KEY=abc python\n  n: 1": "- run: WANDB_API_KEY=***\n  n: 1",
    'headers: \'{"api_key": "abc"}\'': "headers: '{\"api_key\": ***'",
    "private_key: |\n  abc\n\n  abc\nn: 1": "private_key: '***'\nn: 1",
    "run: |\n  A_TOKEN=abc\n  abc\nn: 1": "run: A_TOKEN=***\nn: 1",
    "api_keys:\n- abc\n- abc\nn: 1": "api_keys: '***'\nn: 1",
    "credentials:\n  user: abc\nn: 1": "credentials: '***'\nn: 1",
    "pin_token: 123": "pin_token: '***'",
}
HARMLESS_LINES = ["max_tokens: 3", "stop_token_ids:\n- 3\n- 4", "level: token", "pad_token: x", "hf_token: null"]
HARMLESS_LINES += ["- max_tokens=3", "mode: token-mean", "stats_key: none", "tokens_per_second: 3", "n: tokens=3"]


@pytest.mark.parametrize("text", SECRET_LINES)
def test_secrets_in_all_places_stay_behind(text: str) -> None:
    assert without_secrets(text) == SECRET_LINES[text] + "\n"


@pytest.mark.parametrize("text", HARMLESS_LINES)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert without_secrets(text) == text + "\n"


def test_a_configuration_that_is_no_yaml_is_not_shown() -> None:
    assert "abc" not in without_secrets("token: abc\n- {")


def test_the_environment_names_versions_and_no_machine() -> None:
    environment = describe_environment()
    assert {"trinity-lightning", "Python", "torch", "CPU", "memory", "GPU"} <= environment.keys()
    assert not any(str(Path.home()) in value for value in environment.values())


def test_steps_that_trained_nothing_are_listed_with_their_reasons(tmp_path: Path) -> None:
    both = {f"{UNTRAINED}filtered_by_{EVIL}": 3, f"{UNTRAINED}truncated": 5}
    idle = {f"{UNTRAINED}equal_rewards": 62, f"{UNTRAINED}filtered_by_reward_filter": 2}
    rows: list[dict[str, object]] = [
        {"step": 0, "explore_step": 0, "eval/sums/mean@1": 0.5},
        {"step": 0, "explore_step": 1, "experience_pipeline/trained": 8},
        {"step": 1, "explore_step": 2, "experience_pipeline/trained": 0, **idle},
        {"step": 2, "explore_step": 3, "experience_pipeline/trained": 4, f"{UNTRAINED}truncated": 4},
        {"step": 3, "explore_step": 4, "experience_pipeline/trained": 0, **both},
    ]
    write_metrics(tmp_path, rows)
    text = Page(report_page(read_run(tmp_path))).text
    assert "Steps that trained on no rollout 2 of 4 steps" in " ".join(text.split())
    assert "equal rewards (62), filtered by reward_filter (2)" in text
    assert "truncated (5), filtered by" in text
    assert "truncated (4)" not in text
    assert "(0)" not in text
    write_metrics(tmp_path, rows[:2])
    assert "trained on no rollout" not in report_page(read_run(tmp_path))


def test_a_reason_that_a_run_of_an_earlier_version_did_not_count_in_a_step_is_0_there(tmp_path: Path) -> None:
    name = f"{UNTRAINED}equal_rewards"
    write_metrics(
        tmp_path,
        [
            {"step": 0, "explore_step": 0, "eval/sums/mean@1": 0.5},
            {"step": 0, "explore_step": 1, "experience_pipeline/trained": 8, name: 3},
            {"step": 1, "explore_step": 2, "experience_pipeline/trained": 8},
            {"step": 2, "explore_step": 3, "experience_pipeline/trained": 8, name: 5},
        ],
    )
    run = read_run(tmp_path)
    assert run.series(name) == [(1, 3), (2, 0), (3, 5)]
    assert run.series(f"{UNTRAINED}truncated") == []


def test_a_completion_that_was_not_trained_on_says_why(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    record = {
        "task": 0,
        "prompt": "Q",
        "completion": "A",
        "reward": 0.0,
        "trained": False,
        "reason": f"filtered by {EVIL}",
    }
    (tmp_path / "completions" / "step_1.jsonl").write_text(json.dumps(record))
    assert "not trained: filtered by </pre>" in Page(report_page(read_run(tmp_path))).text
