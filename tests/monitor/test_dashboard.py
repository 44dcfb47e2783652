"""The dashboard: its panels draw metrics that runs have, and W&B's client sends its views to a project once.

The server here answers like W&B's in the three requests of the command. Nobody has tried it with an account.
"""

import itertools
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from omegaconf import OmegaConf
from support.compose import composed
from support.runs import ROOT, start

from trinity_lightning.cli import dashboard as command
from trinity_lightning.monitor.dashboard import (
    HELD_OUT_BEST,
    HELD_OUT_LAST,
    PINNED,
    SECTIONS,
    SWEEP_PANELS,
    SWEPT,
    X_AXIS,
    Panel,
)
from trinity_lightning.monitor.presentation import METRICS, find_metric
from trinity_lightning.monitor.rows import STEP_METRIC
from trinity_lightning.monitor.wandb_logger import summary_of

PANELS = [panel for section in SECTIONS for panel in section.panels]
OFFERED = (HELD_OUT_BEST, HELD_OUT_LAST)


def names_of(pattern: str) -> list[str]:
    """The names that a line of the table of metrics stands for, with 4 for whatever the configuration gives."""
    parts = re.split(r"\{([^}]*)\}", re.sub(r"<[^>]*>", "4", pattern))
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


@pytest.mark.parametrize("panel", [*PANELS, *SWEEP_PANELS], ids=lambda panel: panel.title)
def test_a_panel_draws_documented_metrics_and_says_why(panel: Panel) -> None:
    assert [name for name in panel.metrics if find_metric(name) is None] == []
    assert bool(panel.metrics) != bool(panel.regex)
    assert panel.matching([name for metric in METRICS for name in names_of(metric.pattern)])
    assert panel.why[0].isupper()
    assert panel.why[-1] in ".?"


def test_no_panel_is_there_twice() -> None:
    assert len({panel.title for panel in PANELS}) == len(PANELS)
    drawn = [name for panel in PANELS for name in panel.metrics or (panel.regex,)]
    assert sorted(set(drawn)) == sorted(drawn)


def test_patterns_keep_the_held_out_reward_apart_from_other_means() -> None:
    reward, further = (
        next(panel for panel in PANELS if panel.title == title)
        for title in ("Held-out reward", "Further held-out means")
    )
    names = ["eval/sums/mean@4", "eval/sums/accuracy/mean@4", "eval/sums/mean@4x", "eval/sums/pass@4", "reward/mean"]
    assert reward.matching(names) == ["eval/sums/mean@4"]
    assert further.matching(names) == ["eval/sums/accuracy/mean@4"]


def test_axis_project_and_settings_are_those_of_runs() -> None:
    assert X_AXIS == STEP_METRIC
    conf = yaml.safe_load((ROOT / "conf" / "logger" / "wandb_offline.yaml").read_text())
    assert conf["wandb"]["project"] == command.PROJECT
    config = composed("+recipe=grpo")
    missing = object()
    settings = [axis.name for axis in SWEPT if axis.is_setting]
    assert [key for key in settings if OmegaConf.select(config, key, default=missing) is missing] == []


def test_columns_are_statistics_that_runs_ask_for() -> None:
    scores = [axis.name for axis in SWEPT if not axis.is_setting]
    for column in [*PINNED, *scores]:
        name, _, statistic = column.rpartition(".")
        assert column in OFFERED or statistic in (summary_of(name) or "").split(","), column


def test_summaries_are_those_of_single_metrics() -> None:
    assert summary_of("reward/mean") == summary_of("eval/sums/mean@4") == summary_of("reward/math/mean") == "max,last"
    assert summary_of("eval/loss") == "min,last"
    assert summary_of("eval/sums/seconds") is summary_of("actor/lr") is None


def test_the_page_lists_the_charts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import metrics_docs  # pyright: ignore[reportMissingImports]

    assert metrics_docs.WANDB_PAGE.read_text() == metrics_docs.wandb_page(), "run: python scripts/metrics_docs.py"


# -- printing ----------------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    command.main(["--print", "--project", "sums"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wandb-workspaces uses pydantic as it was
def test_the_views_are_printed_without_an_account(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    first = printed(capsys)
    assert first == printed(capsys)
    run, sweep = first["views"]
    assert (first["project"], run["name"], sweep["name"]) == ("sums", "Run", "Sweep")
    sections = run["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section["name"] for section in run["sections"]]
    assert [section.name for section in SECTIONS] == [section["name"] for section in sections]
    for section, sent in zip(SECTIONS, sections, strict=True):
        notes, *plots = sent["panels"]
        assert all(panel.why in notes["config"]["value"] for panel in section.panels)
        for panel, plot in zip(section.panels, plots, strict=True):
            config = plot["config"]
            assert (config["chartTitle"], config["metrics"]) == (panel.title, list(panel.metrics))
            assert config.get("metricRegex", "") == panel.regex
            assert config["xAxis"] == X_AXIS
    runs = sweep["spec"]["section"]["runSets"][0]
    assert runs["sort"]["keys"] == [{"key": {"section": "summary", "name": HELD_OUT_BEST}, "ascending": False}]
    assert runs["grouping"] == [{"section": "run", "name": "group"}]
    coordinates = sweep["spec"]["section"]["panelBankConfig"]["sections"][0]["panels"][0]
    accessors = [column["accessor"] for column in coordinates["config"]["columns"]]
    assert accessors[0] == "config:optimizer.value.lr"
    assert accessors[-1] == f"summary:{HELD_OUT_BEST}"


def test_a_missing_package_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    for arguments in ([], ["--print"]):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == 2
        assert capsys.readouterr().err == (
            "trinity-lightning dashboard: the dashboard needs the package wandb-workspaces, which is not installed: "
            "pip install 'trinity-lightning[dashboard]'.\n"
        )


# -- saving ------------------------------------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """Knows the project of the user `me`, and keeps views."""

    views: ClassVar[dict[str, dict[str, Any]]] = {}

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        request: Any = json.loads(asked) if self.path == "/graphql" else {"query": ""}
        query, variables = request["query"], request.get("variables") or {}
        answer: dict[str, Any] = {}
        if "viewer" in query:
            answer = {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        elif "upsertView" in query:
            self.views.setdefault(variables["name"], {"saved": 0}).update(variables)
            self.views[variables["name"]]["saved"] += 1
            answer = {"upsertView": {"view": {"id": f"id of {variables['name']}", "name": variables["name"]}}}
        elif "allViews" in query and variables["entityName"] == "me":
            named = [view for name, view in self.views.items() if name == variables["viewName"]]
            nodes = [{"node": {"id": f"id of {v['name']}", "displayName": "", "spec": v["spec"]}} for v in named]
            answer = {"project": {"allViews": {"edges": nodes}}}
        elif "allViews" in query:
            answer = {"project": None}
        content = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Answers.views.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def called(folder: Path, url: str, *arguments: str, key: str = "a" * 40) -> Any:
    """The command, started in a folder of its own, with a login for the server at this address."""
    folder.mkdir()
    login = {"HOME": str(folder), "NETRC": str(folder / "none"), "WANDB_API_KEY": key, "WANDB_BASE_URL": url}
    return start(folder, *arguments, program="trinity_lightning.cli.dashboard", WANDB_MODE="online", **login)


@pytest.mark.slow
def test_a_second_call_updates_the_views_of_the_first(server: str, tmp_path: Path) -> None:
    unreachable = called(tmp_path / "unreachable", "http://127.0.0.1:9")
    nobody = called(tmp_path / "nobody", server, key="")
    other = called(tmp_path / "other", server, "--entity", "other", "--project", "sums")
    address = f"{server}/me/trinity_lightning?nw"
    for verb in ("made", "updated"):
        process = called(tmp_path / verb, server)
        assert process.wait(120) == 0
        assert (tmp_path / verb / "stdout").read_text().splitlines() == [
            f"{verb} the view Run: {address}=trinityruns",
            f"{verb} the view Sweep: {address}=trinitysweep",
        ]
    run, sweep = Answers.views.values()
    assert [view["saved"] for view in (run, sweep)] == [2, 2]
    assert [view["displayName"] for view in (run, sweep)] == ["Run", "Sweep"]
    assert run["id"] == "id of nw-trinityruns-v"  # by which W&B replaces it
    assert json.loads(run["spec"])["section"]["panelBankConfig"]["sections"][0]["name"] == SECTIONS[0].name

    for process, folder, sentence in (
        (nobody, "nobody", "saving views needs a login at W&B, and this machine has none: run `wandb login`"),
        (other, "other", "there is no project 'sums' of 'other', or your login may not see it: give --entity"),
        (
            unreachable,
            "unreachable",
            "W&B has not saved the views: Failed to verify credentials with http://127.0.0.1:9",
        ),
    ):
        assert process.wait(120) == 2
        (line,) = (tmp_path / folder / "stdout").read_text().splitlines()
        assert line.startswith(f"trinity-lightning dashboard: {sentence}")
