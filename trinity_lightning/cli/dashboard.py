"""`trinity-lightning dashboard`: make two saved views in a project of W&B, of a run and of a sweep, or print them."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trinity_lightning.config.output import end_unread
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

    from trinity_lightning.monitor.dashboard import Panel

PROJECT = "trinity_lightning"  # logger.wandb.project, unless it is set
# Names by which W&B finds a view again, letters and digits only. The views' titles may be changed in the browser.
RUN_VIEW, SWEEP_VIEW = "trinityruns", "trinitysweep"
COLUMNS = 3  # panels beside each other
TIMEOUT = 10  # seconds of a request to W&B
HELP = """\
Make two saved views in a project of Weights & Biases: "Run", whose sections are in the order in which people look, and
"Sweep", with parallel coordinates. A second call updates the same two views, and what was changed in them in the
browser is lost: save your own as another view. Metrics whose names depend on the configuration, eval/TASKSET/... for
example, are found by patterns, so that the views fit the runs of every recipe. docs/wandb.md shows what is in them.
This needs pip install 'trinity-lightning[dashboard]'."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point. A missing package or login, and what W&B refuses, are one message and exit code 2."""
    if arguments is None:
        end_unread()
    parser = argparse.ArgumentParser(
        prog="trinity-lightning dashboard", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entity", help="user or team that owns the project; the default is that of your login")
    parser.add_argument(
        "--project", default=PROJECT, help=f"name of the project; the default is that of runs, {PROJECT}"
    )
    parser.add_argument("--print", action="store_true", help="print the views as JSON; this needs no account")
    options = parser.parse_args(arguments)
    try:
        if options.print:
            views = views_of(options.entity or "", options.project)
            print(json.dumps(described(views), indent=1, ensure_ascii=False))
        else:
            for line in save(options.entity, options.project):
                print(line, flush=True)
    except ConfigError as error:
        print(f"trinity-lightning dashboard: {error}", file=sys.stderr)
        sys.exit(2)


# -- what W&B is sent --------------------------------------------------------------------------------------------------


def views_of(entity: str, project: str) -> "list[Workspace]":
    """The two views, as wandb-workspaces has them; nothing is sent.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    os.environ.setdefault("WANDB_SILENT", "true")  # it would print lines of its own beside ours
    try:
        from wandb_workspaces import workspaces
    except ImportError as error:
        raise ConfigError(
            "the dashboard needs the package wandb-workspaces, which is not installed",
            fix="pip install 'trinity-lightning[dashboard]'",
        ) from error
    from trinity_lightning.monitor.dashboard import HELD_OUT_BEST, PINNED, SECTIONS, X_AXIS

    best_first = [workspaces.Ordering(workspaces.Summary(HELD_OUT_BEST), ascending=False)]
    pinned = [f"summary:{name}" for name in PINNED]
    run = workspaces.Workspace(
        entity=entity,
        project=project,
        name="Run",
        sections=[_section(section.name, section.panels, section.is_open) for section in SECTIONS],
        settings=workspaces.WorkspaceSettings(x_axis=X_AXIS),
        runset_settings=workspaces.RunsetSettings(pinned_columns=list(pinned)),
    )
    sweep = workspaces.Workspace(
        entity=entity,
        project=project,
        name="Sweep",
        sections=_sweep_sections(),
        settings=workspaces.WorkspaceSettings(x_axis=X_AXIS, max_runs=50),
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Metric("Group")], order=best_first, pinned_columns=list(pinned)
        ),
    )
    for view, name in ((run, RUN_VIEW), (sweep, SWEEP_VIEW)):
        view._internal_name = f"nw-{name}-v"
        for number, panel in enumerate(panel for section in view.sections for panel in section.panels):
            # Else it is drawn by chance, and two calls would print two things.
            panel._id = f"{name}{number}"  # pyright: ignore[reportAttributeAccessIssue]
    return [run, sweep]


def _section(name: str, panels: "Sequence[Panel]", is_open: bool, *first: Any) -> "Section":
    """A section that begins with the reasons for its panels, behind panels of other kinds."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2 import MarkdownPanel

    only = {panel: f" *Only {panel.only}.*" if panel.only else "" for panel in panels}
    notes = "\n".join(f"- **{panel.title}.** {panel.why}{only[panel]}" for panel in panels)
    drawn = [*first, MarkdownPanel(markdown=notes), *map(_line_plot, panels)]
    layout = workspaces.SectionLayoutSettings(columns=COLUMNS, rows=math.ceil(len(drawn) / COLUMNS))
    return workspaces.Section(name=name, panels=drawn, is_open=is_open, layout_settings=layout)


def _line_plot(panel: "Panel") -> Any:
    from wandb_workspaces.reports.v2 import LinePlot

    from trinity_lightning.monitor.dashboard import X_AXIS

    return LinePlot(
        title=panel.title,
        x=X_AXIS,
        y=list(panel.metrics),
        metric_regex=panel.regex or None,
        log_y=panel.log or None,
        plot_type="stacked-area" if panel.stacked else None,
    )


def _sweep_sections() -> "list[Section]":
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2.interface import (
        BarPlot,
        Config,
        ParallelCoordinatesPlot,
        ParallelCoordinatesPlotColumn,
        ParameterImportancePlot,
        RunComparer,
        SummaryMetric,
    )

    from trinity_lightning.monitor.dashboard import HELD_OUT_BEST, SWEEP_PANELS, SWEPT

    columns = [
        ParallelCoordinatesPlotColumn(
            metric=Config(axis.name) if axis.is_setting else SummaryMetric(axis.name),
            display_name=axis.title,
            log=axis.log or None,
        )
        for axis in SWEPT
    ]
    settings = [
        ParallelCoordinatesPlot(title="Settings and scores", columns=columns),
        BarPlot(title="Best held-out reward", metrics=[HELD_OUT_BEST], max_runs_to_show=50),
        ParameterImportancePlot(with_respect_to=HELD_OUT_BEST),
    ]
    wide = workspaces.SectionLayoutSettings(columns=1, rows=1)
    return [
        workspaces.Section(name="Which settings", panels=settings, is_open=True, layout_settings=wide),
        _section("Curves over each other", SWEEP_PANELS, is_open=True),
        workspaces.Section(name="What differs between runs", panels=[RunComparer(diff_only="split")]),
    ]


def described(views: "Sequence[Workspace]") -> dict[str, Any]:
    """The views for people, who read `sections`, and `spec` as W&B is sent it."""
    from trinity_lightning.monitor.dashboard import SECTIONS, SWEEP_PANELS, SWEPT

    run, sweep = views
    spec = {view.name: view._spec["spec"] for view in views}
    return {
        "project": run.project,
        "entity": run.entity or None,
        "views": [
            {"name": run.name, "sections": [asdict(section) for section in SECTIONS], "spec": spec[run.name]},
            {
                "name": sweep.name,
                "parallel_coordinates": [asdict(axis) for axis in SWEPT],
                "panels": [asdict(panel) for panel in SWEEP_PANELS],
                "spec": spec[sweep.name],
            },
        ],
    }


# -- sending it --------------------------------------------------------------------------------------------------------


def save(entity: str | None, project: str) -> list[str]:
    """Make the views, or update those that an earlier call made, and return a line about each.

    Raises:
        ConfigError: wandb-workspaces is not installed, there is no login, or W&B cannot be reached or refuses.
    """
    views_of("", project)  # a missing package is the first thing to say
    import wandb
    from wandb.errors import UsageError

    try:
        api = wandb.Api(timeout=TIMEOUT)
        owner = entity or api.default_entity
        if not owner:
            raise ConfigError("your login has no default entity", fix="give --entity, a user or a team")
        return [_save(view, name) for view, name in zip(views_of(owner, project), (RUN_VIEW, SWEEP_VIEW), strict=True)]
    except ConfigError:  # it is a ValueError too
        raise
    except UsageError as error:
        raise ConfigError(
            "saving views needs a login at W&B, and this machine has none",
            fix="run `wandb login`, set WANDB_API_KEY, or see the views with --print",
        ) from error
    except (wandb.Error, ValueError, OSError) as error:
        problem = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"W&B has not saved the views: {problem}", fix="check network, --entity and --project"
        ) from error


def _save(view: "Workspace", name: str) -> str:
    from wandb_workspaces.workspaces.internal import get_view_dict

    try:
        view._internal_id = get_view_dict(view.entity, view.project, name)["id"]
    except ValueError as error:
        if not str(error).startswith("Workspace "):  # else it is the project that is missing
            raise ConfigError(
                f"there is no project '{view.project}' of '{view.entity}', or your login may not see it",
                fix="give --entity and --project, or begin it by a first run (logger=wandb, or `wandb sync`)",
            ) from error
    done = "updated" if view._internal_id else "made"
    view.save()
    return f"{done} the view {view.name}: {view.url}"


if __name__ == "__main__":
    main()
